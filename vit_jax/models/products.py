"""The products that models are made of: tokens with kernels, and tokens with tokens. Each is of
operands in the compute dtype, summed in float32.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax import parallel


class Linear(nnx.Linear):
    """`nnx.Linear` by `dense`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., F) in the layer's dtype."""
        return dense(x.astype(self.dtype), self.kernel[...], self.bias[...])


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """x (..., D), kernel (D, *F) and bias (*F), float32 or `shared` -> (..., *F) in the dtype of x."""
    if x.dtype == jnp.bfloat16 and parallel.platform() == "cpu":
        return _dense_on_cpu(x, kernel, jnp.zeros(kernel.shape[1:]) if bias is None else bias)
    y = jnp.tensordot(x, kernel.astype(x.dtype), 1)
    return y if bias is None else y + bias.astype(x.dtype)


def shared(kernel: jax.Array, bias: jax.Array | None, dtype) -> tuple[jax.Array, jax.Array | None]:
    """Parameters for `dense` of several arrays: cast once for all, so that their gradients are added
    up before devices exchange them. On CPUs `dense` does it, which needs them in float32.
    """
    if parallel.platform() == "cpu":
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
    # Moved first: what is contracted over several axes, XLA does not fold into the product.
    of_kernel = _contract(jnp.moveaxis(x, -1, 0), gradient, range(1, x.ndim), tokens)
    return of_x.astype(x.dtype), of_kernel, jnp.sum(gradient, tokens, dtype=jnp.float32)


_dense_on_cpu.defvjp(_dense_forward, _dense_backward)


def _contract(a, b, axes_of_a, axes_of_b):
    contracted = (tuple(axes_of_a), tuple(axes_of_b))
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)
