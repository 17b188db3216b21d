"""The programs in which other tests find formulas without rounding."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import float64


@jax.custom_vjp
def _rounded_product(a, b):
    return jnp.einsum("ij,jk->ik", a, b, preferred_element_type=jnp.float32)


_rounded_product.defvjp(lambda a, b: (_rounded_product(a, b), None), lambda _, g: (g, g))


def _layers(x, kernels):
    """Norms and products of a stack, by all that calls programs: a loop, a branch, recomputation, own gradients."""

    @jax.checkpoint
    def layer(x, kernel):
        x = x.astype(jnp.float32)
        x = (x - x.mean(-1, keepdims=True)) / jnp.float32(3)
        product = jax.lax.cond(kernel.sum() > 0, _rounded_product, lambda a, b: a @ -b, x, kernel)
        return jnp.tanh(product), None

    return {"x": jax.lax.scan(layer, x, kernels)[0], "count": jnp.arange(3)}


def test_a_program_is_computed_in_float64_wherever_it_rounds():
    random = np.random.default_rng(0)
    x, kernels = random.normal(size=(4, 8)), random.normal(size=(3, 8, 8))
    outputs = float64.in_float64(_layers)(x, kernels)
    for kernel in kernels:
        centred = (x - x.mean(-1, keepdims=True)) / 3
        x = np.tanh(centred @ (kernel if kernel.sum() > 0 else -kernel))
    np.testing.assert_allclose(outputs["x"], x, rtol=1e-13, atol=1e-15)
    assert outputs["count"].tolist() == [0, 1, 2] and not jax.config.jax_enable_x64
