"""Dropout, stochastic depth, and keys for them."""

import jax
import jax.numpy as jnp


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
