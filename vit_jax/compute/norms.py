"""Normalising over the last axis, with a backward pass of its own."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.compute import recompute


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def normalise(x: jax.Array, epsilon: float) -> jax.Array:
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


normalise.defvjp(_normalise_forward, _normalise_backward)
