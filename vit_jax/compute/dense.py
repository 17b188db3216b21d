"""The products that models are made of: tokens with kernels, and tokens with tokens. Each is of
operands in the compute dtype, summed in float32.
"""

import math

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x (..., D), kernel (D, *F) and bias (*F), float32 or `shared` -> (..., *F) in the dtype of x."""
    if x.dtype == jnp.bfloat16 and partitioning.platform() == "cpu":
        return _dense_on_cpu(x, kernel, jnp.zeros(kernel.shape[1:]) if bias is None else bias)
    y = jnp.tensordot(x, kernel.astype(x.dtype), 1)
    return y if bias is None else y + bias.astype(x.dtype)


def dense_features_first(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """`dense` of x (B, N, D) by a kernel (D, F), as (F, B, N): a TPU then writes tokens last, as its
    attention reads them, where the other order may need a copy.
    """
    y = jnp.tensordot(kernel.astype(x.dtype), x, ((0,), (2,)))
    return y if bias is None else y + bias.astype(x.dtype)[:, None, None]


def shared(kernel: jax.Array, bias: jax.Array | None, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Parameters for `dense` of several arrays: cast once for all, so that their gradients are added
    up before devices exchange them. On CPUs `dense` does it, which needs them in float32.
    """
    if partitioning.platform() == "cpu":
        return kernel, bias
    return kernel.astype(dtype), None if bias is None else bias.astype(dtype)


def product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """The `einsum` of two arrays, in float32."""
    return jnp.einsum(formula, a, b, preferred_element_type=jnp.float32)


@jax.custom_vjp
def _dense_on_cpu(x, kernel, bias):
    """XLA's CPU back end multiplies in bfloat16 only where the result is float32 and the left
    operand is summed over its last axes; all else it converts to float32 first. So each product
    here, and those of the backward pass, which automatic differentiation would write otherwise; as
    it would sum the bias's gradient in bfloat16.
    """
    return _dense_forward(x, kernel, bias)[0]


def _dense_forward(x, kernel, bias):
    rounded = kernel.astype(x.dtype)
    y = _contract(x, rounded, [x.ndim - 1], [0]) + bias
    return y.astype(x.dtype), (x, rounded)


def _dense_backward(saved, gradient):
    x, kernel = saved
    tokens = tuple(range(x.ndim - 1))
    of_x = _contract(gradient, kernel, range(x.ndim - 1, gradient.ndim), range(1, kernel.ndim))
    of_bias = jnp.sum(gradient, tokens, dtype=jnp.float32)
    return of_x.astype(x.dtype), _of_kernel(x, gradient), of_bias


def _of_kernel(x, gradient):
    """x (..., D), gradient (..., *F) -> (D, *F). The narrower of both is moved, before the product:
    XLA does not fold a contraction of several axes into it.
    """
    tokens, of_tokens = range(x.ndim - 1), range(1, x.ndim)
    features = gradient.shape[x.ndim - 1 :]
    if math.prod(features) >= x.shape[-1] or x.shape[-1] % 2:
        return _contract(jnp.moveaxis(x, -1, 0), gradient, of_tokens, tokens)
    gradient = gradient.reshape(*x.shape[:-1], -1)
    product = _contract(jnp.moveaxis(gradient, -1, 0), x, of_tokens, tokens)
    # In three axes: a plain transpose XLA would undo by moving x after all.
    halves = product.reshape(len(product), 2, -1).transpose(1, 2, 0)
    return halves.reshape(x.shape[-1], *features)


_dense_on_cpu.defvjp(_dense_forward, _dense_backward)


def _contract(a, b, axes_of_a, axes_of_b):
    contracted = (tuple(axes_of_a), tuple(axes_of_b))
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
