"""Dropout, stochastic depth, and keys for them."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate); `key=None`
    leaves x alone.
    """
    if rate == 0 or key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def drop_path(residual: jax.Array, rate: jax.Array | float, key: jax.Array | None) -> jax.Array:
    """Stochastic depth (arXiv 1603.09382): drops an example's residual with probability `rate`,
    scales the others up.

    Args:
      residual: (B, ...) what a block adds to its input.
      rate: scalar in [0, 1); may be traced, since it grows with depth.
      key: `None` leaves the residual alone.
    """
    if key is None:
        return residual
    keep = jax.random.bernoulli(key, 1 - rate, (residual.shape[0],) + (1,) * (residual.ndim - 1))
    return residual * (keep / (1 - rate)).astype(residual.dtype)


def split(key: jax.Array | None, count: int) -> list:
    """`count` keys, or that many `None` where there is no randomness."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def draw_key(rngs: nnx.Rngs | None, deterministic: bool, *rates: float) -> jax.Array | None:
    """A key of the stream `dropout`; `None` where nothing is random: when deterministic, or if all rates are 0.

    Raises:
      ValueError: a rate is not 0 and there are no `rngs`.
    """
    if deterministic or not any(rates):
        return None
    if rngs is None:
        raise ValueError(
            "a model with dropout or stochastic depth needs rngs unless deterministic=True"
        )
    return rngs.dropout()


def by_depth(
    rate: float, depth: int, key: jax.Array | None, *, constant: bool = False
) -> tuple[np.ndarray, jax.Array | None]:
    """Each layer's rate of stochastic depth, growing linearly from 0 in the first to `rate` in the last (arXiv
    1603.09382 §3), and each layer's key: (depth,) both; no keys without `key`. With `constant`, `rate` in every layer.
    """
    rates = np.linspace(rate if constant else 0, rate, depth, dtype=np.float32)
    return rates, None if key is None else jax.random.split(key, depth)
