"""Matrix products: tokens with kernels, and tokens with tokens."""

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from vit_jax.compute.platform import by_platform

_gradients = contextvars.ContextVar("gradients", default="float32")


@contextlib.contextmanager
def gradients_in(dtype: str) -> Iterator[None]:
    """In what is traced inside, gradients of kernels have this type before they are added over devices, on platforms
    that can choose it: see `config.mesh.gradients`.
    """
    token = _gradients.set(dtype)
    try:
        yield
    finally:
        _gradients.reset(token)


def gradient_dtype() -> jnp.dtype:
    """The type that `gradients_in` has set for the gradients of kernels."""
    return jnp.dtype(_gradients.get())


@by_platform
def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x kernel + bias, in the dtype of x.

    Args:
      x: (..., D).
      kernel: (D, *F) float32.
      bias: (*F) float32, or `None`.

    Returns:
      (..., *F).
    """
    y = jnp.tensordot(x, kernel.astype(x.dtype), 1)
    return y if bias is None else y + bias.astype(x.dtype)


@by_platform
def product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The `einsum` of two arrays, summed in float32 and not rounded after."""
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def to_float32(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x kernel, summed in float32 and not rounded after: (..., D) and (D, K) of one dtype -> (..., K).

    For logits of many classes, whose gradient is rounded to that dtype before it is multiplied, as that of
    `dense` is: in float32 its products are several times slower and its memory is twice as large.
    """
    return jnp.matmul(x, kernel, preferred_element_type=jnp.float32)


def _forward(x, kernel):
    return to_float32(x, kernel), (x, kernel)


def _backward(saved, gradient):
    x, kernel = saved
    gradient = gradient.astype(x.dtype)
    rows = tuple(range(x.ndim - 1))
    return gradient @ kernel.T, jnp.tensordot(x, gradient, (rows, rows))


to_float32.defvjp(_forward, _backward)
