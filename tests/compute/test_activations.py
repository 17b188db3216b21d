"""Activations against their formulas."""

import jax.numpy as jnp
import numpy as np
import scipy.special

from vit_jax.compute import activations


def test_activations_are_their_formulas():
    x = np.linspace(-6, 6, 101)
    formulas = {
        "gelu_tanh": x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
        "gelu": x / 2 * (1 + scipy.special.erf(x / np.sqrt(2))),
        "quick_gelu": x / (1 + np.exp(-1.702 * x)),
        "silu": x / (1 + np.exp(-x)),
    }
    assert formulas.keys() == activations.ACTIVATIONS.keys()
    for name, expected in formulas.items():
        np.testing.assert_allclose(
            activations.ACTIVATIONS[name](jnp.asarray(x, jnp.float32)), expected, atol=2e-6
        )
