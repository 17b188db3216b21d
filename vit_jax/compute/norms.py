"""Norms: over the last axis of each token, or over a batch for each channel."""

import functools

import jax
import jax.numpy as jnp

from vit_jax.compute import recompute
from vit_jax.compute.dense import product
from vit_jax.compute.platform import by_platform


@by_platform
def layer_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array | None,
    *,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
) -> jax.Array:
    """x (..., D) with mean 0 and variance 1 over the last axis, times scale (D,),
    plus bias (D,) or `None`: in `dtype`, computed in float32 (arXiv 1607.06450).
    """

    y = _normalise(x, epsilon) * scale
    return (y if bias is None else y + bias).astype(dtype)


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
    saved = x, *_statistics(x, epsilon)
    return _normed(*saved), saved


def _normed(x, mean, inverse):
    return (x.astype(jnp.float32) - mean) * inverse


def _statistics(x, epsilon):
    """Mean and inverse deviation over the last axis, (..., 1) float32."""
    y = x.astype(jnp.float32)
    mean = y.mean(-1, keepdims=True)
    variance = jnp.maximum(0, jnp.square(y).mean(-1, keepdims=True) - jnp.square(mean))
    mean = recompute.named(mean, recompute.STATISTICS)
    inverse = recompute.named(jax.lax.rsqrt(variance + epsilon), recompute.STATISTICS)
    return mean, inverse


def _normalise_backward(epsilon, saved, dy):
    x, _, inverse = saved
    y = _normed(*saved)
    along = y * (dy * y).mean(-1, keepdims=True)
    dx = (dy - dy.mean(-1, keepdims=True) - along) * inverse
    return (dx.astype(x.dtype),)


_normalise.defvjp(_normalise_forward, _normalise_backward)


def layer_norm_product(
    x: jax.Array, scale: jax.Array, bias: jax.Array, vectors: jax.Array, *, epsilon: float
) -> jax.Array:
    """Products of vectors (B, Q, D) with `layer_norm` of x (B, N, D), (B, N, Q) float32, without the normed x,
    which costs more than the products if there are few vectors and many tokens.

    With the scale in the vectors, (x - mean) · v = x · (v - mean of v), and the deviation divides the product.
    """
    scaled = vectors.astype(jnp.float32) * scale
    centred = (scaled - scaled.mean(-1, keepdims=True)).astype(x.dtype)
    _, inverse = _statistics(x, epsilon)
    return product("bnd,bqd->bnq", x, centred) * inverse + (vectors @ bias)[:, None]


@by_platform
def rms_norm(
    x: jax.Array, scale: jax.Array, *, epsilon: float, dtype: jax.typing.DTypeLike
) -> jax.Array:
    """x (..., D) with a mean square of 1 over the last axis, times scale (D,): in
    `dtype`, computed in float32 (arXiv 1910.07467).
    """
    return (_divide_by_rms(x, epsilon) * scale).astype(dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _divide_by_rms(x: jax.Array, epsilon: float) -> jax.Array:
    """As `_normalise`, without the mean."""
    return _rms_forward(x, epsilon)[0]


def _rms_forward(x, epsilon):
    y = x.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.square(y).mean(-1, keepdims=True) + epsilon)
    inverse = recompute.named(inverse, recompute.STATISTICS)
    return y * inverse, (x, inverse)


def _divided(x, inverse):
    return x.astype(jnp.float32) * inverse


def _rms_backward(epsilon, saved, dy):
    x, inverse = saved
    y = _divided(*saved)
    dx = (dy - y * (dy * y).mean(-1, keepdims=True)) * inverse
    return (dx.astype(x.dtype),)


_divide_by_rms.defvjp(_rms_forward, _rms_backward)

# Norms without scale and bias, for platforms that differentiate those together with them: (x, epsilon) -> the normed x
# in float32, and what the backward pass stores; the normed x of what is stored; (epsilon, what is stored, dy) -> (dx,).
LAYER = _normalise_forward, _normed, _normalise_backward
RMS = _rms_forward, _divided, _rms_backward


def batch_norm(
    x: jax.Array, scale: jax.Array, bias: jax.Array, *, axis: int, epsilon: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """x with mean 0 and variance 1 over all axes but `axis`, times scale, plus bias (arXiv 1502.03167,
    Algorithm 1), computed in float32 or better.

    Where the batch is sharded over devices, its statistics are of the whole.

    Args:
      x: channels, C of them, along `axis`.
      scale, bias: (C,).

    Returns:
      The like of x; and mean and variance (C,), the latter divided by the count of values, not by
      one less. No gradient goes through these two.
    """
    return _batch_norm(x, scale, bias, axis % x.ndim, epsilon)


def normalise_by(
    x: jax.Array,
    mean: jax.Array,
    variance: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    *,
    axis: int,
    epsilon: float,
) -> jax.Array:
    """As `batch_norm`, with a mean and variance (C,) that are given."""
    return _scaled(x, mean, scale * jax.lax.rsqrt(variance + epsilon), bias, axis % x.ndim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _batch_norm(x, scale, bias, axis, epsilon):
    """The backward pass takes both sums of a channel at once, and stores x alone."""
    return _batch_norm_forward(x, scale, bias, axis, epsilon)[0]


def _batch_norm_forward(x, scale, bias, axis, epsilon):
    y = _wide(x)
    others = _all_but(axis, x)
    mean = y.mean(others)
    # A second pass, not the mean of squares in the first: where a channel varies little, as attention
    # maps do, that loses two digits. It also finds what the first pass rounded off.
    centred = y - _along(mean, x, axis)
    rest = centred.mean(others)
    mean = mean + rest
    variance = jnp.square(centred).mean(others) - jnp.square(rest)
    mean = recompute.named(mean, recompute.STATISTICS)
    inverse = recompute.named(jax.lax.rsqrt(variance + epsilon), recompute.STATISTICS)
    y = _scaled(x, mean, scale * inverse, bias, axis)
    return (y, mean, variance), (x, scale, mean, inverse)


def _batch_norm_backward(axis, epsilon, saved, gradients):
    x, scale, mean, inverse = saved
    dy, others = _wide(gradients[0]), _all_but(axis, x)
    y = (_wide(x) - _along(mean, x, axis)) * _along(inverse, x, axis)
    dbias, dscale = dy.sum(others), (dy * y).sum(others)
    count = x.size // x.shape[axis]
    centred = dy - _along(dbias / count, x, axis) - y * _along(dscale / count, x, axis)
    dx = _along(scale * inverse, x, axis) * centred
    return dx.astype(x.dtype), dscale.astype(scale.dtype), dbias.astype(scale.dtype)


_batch_norm.defvjp(_batch_norm_forward, _batch_norm_backward)


def _scaled(x, mean, factor, bias, axis):
    y = (_wide(x) - _along(mean, x, axis)) * _along(factor, x, axis) + _along(bias, x, axis)
    return y.astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _all_but(axis: int, x: jax.Array) -> tuple[int, ...]:
    return tuple(i for i in range(x.ndim) if i != axis)


def _along(vector: jax.Array, x: jax.Array, axis: int) -> jax.Array:
    """(C,) with the axes of x, to broadcast along `axis`."""
    return vector.reshape([-1 if i == axis else 1 for i in range(x.ndim)])
