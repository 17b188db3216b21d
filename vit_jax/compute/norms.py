"""Norms over the last axis."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.compute import recompute
from vit_jax.compute.tokens import Tokens


def layer_norm(
    x: Tokens,
    scale: jax.Array,
    bias: jax.Array | None,
    *,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
) -> Tokens:
    """x (..., D), or several such, with mean 0 and variance 1 over the last axis, times scale (D,),
    plus bias (D,) or `None`: in `dtype`, computed in float32 (arXiv 1607.06450).
    """

    def norm(x):
        y = _normalise(x, epsilon) * scale
        return (y if bias is None else y + bias).astype(dtype)

    return jax.tree.map(norm, x)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _normalise(x: jax.Array, epsilon: float) -> jax.Array:
    """The backward pass reuses what the forward pass has reduced: with automatic differentiation
    CPUs take a third longer, and TPUs store float32 tokens where nothing is recomputed
    (docs/notes/2026-11-22-step-on-tpus.md).

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


def _normalise_backward(epsilon, saved, dy):
    x, mean, inverse = saved
    y = (x.astype(jnp.float32) - mean) * inverse
    along = y * (dy * y).mean(-1, keepdims=True)
    dx = (dy - dy.mean(-1, keepdims=True) - along) * inverse
    return (dx.astype(x.dtype),)


_normalise.defvjp(_normalise_forward, _normalise_backward)
