"""Activations, by the names that configs give them."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from vit_jax.compute import recompute


def _in_float32(formula: Callable) -> Callable:
    """The activation in float32 whatever the dtype of x: rounding between its operations costs more
    than they do where a device has no arithmetic in bfloat16. The backward pass stores x alone.
    """

    def plain(x: jax.Array) -> jax.Array:
        return formula(x.astype(jnp.float32)).astype(x.dtype)

    def forward(x):
        return plain(x), x

    def backward(x, gradient):
        return jax.vjp(plain, recompute.unshared(x))[1](gradient)

    activation = jax.custom_vjp(plain)
    activation.defvjp(forward, backward)
    return activation


def _gelu(x):
    """x Φ(x) (arXiv 1606.08415). With erf: erfc, which keeps the tail's last digits, takes twice as
    long, and there x Φ(x) is less than the rounding of what it is added to.
    """
    return x * (0.5 + 0.5 * jax.lax.erf(x * 0.5**0.5))


ACTIVATIONS: dict[str, Callable] = {
    "gelu_tanh": _in_float32(lambda x: jax.nn.gelu(x, approximate=True)),
    "gelu": _in_float32(_gelu),
    # x σ(1.702 x), of OpenAI's CLIP (arXiv 1606.08415 §2).
    "quick_gelu": _in_float32(lambda x: x * jax.nn.sigmoid(1.702 * x)),
    "silu": _in_float32(jax.nn.silu),
}
