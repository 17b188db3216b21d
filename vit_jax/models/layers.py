"""What every family shares: MLP, norm, dropout and stochastic depth. Attention is next door."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import products, recompute
from vit_jax.models.activations import ACTIVATIONS


class Mlp(nnx.Module):
    """Dense, activation, dropout, dense, dropout (ViT Eq. 3); kernels Xavier-uniform, biases
    normal(1e-6).
    """

    def __init__(
        self, width: int, hidden: int, *, activation: str, dropout: float, dtype, rngs: nnx.Rngs
    ):
        self.up = _mlp_linear(width, hidden, dtype, rngs)
        self.down = _mlp_linear(hidden, width, dtype, rngs)
        self.activation, self.dropout = activation, dropout

    def __call__(self, x, key: jax.Array | None = None):
        """x (..., D) -> the same; or of several such, as a tuple."""
        keys = split(key, 2)
        up, down = _parameters(self.up), _parameters(self.down)

        def run(x):
            x = recompute.keep(products.dense(x, *up), recompute.HIDDEN)
            x = dropout(ACTIVATIONS[self.activation](x), self.dropout, keys[0])
            return dropout(products.dense(x, *down), self.dropout, keys[1])

        return jax.tree.map(run, x)


def layer_norm(
    width: int, epsilon: float, dtype, rngs: nnx.Rngs, *, bias: bool = True
) -> nnx.LayerNorm:
    """Layer norm over the last axis, its statistics in float32 whatever `dtype`."""
    return LayerNorm(width, epsilon=epsilon, use_bias=bias, dtype=dtype, rngs=rngs)


class LayerNorm(nnx.LayerNorm):
    """Flax's, with a backward pass that reduces nothing anew: see `_normalise`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., D) -> the same in the norm's dtype."""
        y = _normalise(x, self.epsilon) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(self.dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalise(x: jax.Array, epsilon: float) -> jax.Array:
    """x (..., D) to mean 0 and variance 1 over the last axis, in float32 (arXiv 1607.06450).

    Mean and deviation are named for `remat`, two numbers a token: recomputing them would take two
    more passes over the tokens.
    """
    return _normalise_forward(x, epsilon)[0]


def _normalise_forward(x, epsilon):
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.maximum(0, jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean))
    mean = recompute.named(mean, recompute.STATISTICS)
    inverse = recompute.named(jax.lax.rsqrt(variance + epsilon), recompute.STATISTICS)
    return (y - mean) * inverse, (x, mean, inverse)


def _normalise_backward(epsilon, saved, gradient):
    x, mean, inverse = saved
    y = (x.astype(jnp.float32) - mean) * inverse
    along = y * (gradient * y).mean(-1, keepdims=True)
    of_x = (gradient - gradient.mean(-1, keepdims=True) - along) * inverse
    return (of_x.astype(x.dtype),)


_normalise.defvjp(_normalise_forward, _normalise_backward)


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


def _parameters(linear: nnx.Linear) -> tuple[jax.Array, jax.Array]:
    return products.shared(linear.kernel[...], linear.bias[...], linear.dtype)


def _mlp_linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.xavier_uniform(),
        bias_init=nnx.initializers.normal(1e-6),
        dtype=dtype,
        rngs=rngs,
    )
