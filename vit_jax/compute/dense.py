"""Matrix products: tokens with kernels, and tokens with tokens."""

import jax
import jax.numpy as jnp

from vit_jax.compute.platform import by_platform


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
