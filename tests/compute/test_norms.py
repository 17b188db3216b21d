"""Norms against Flax and float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.compute import norms
from vit_jax.models import layers


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_norm_and_its_gradients_are_flaxs(bias):
    rng = np.random.default_rng(0)
    x, gradient = (jnp.asarray(rng.normal(3, 2, (2, 5, 16)), jnp.float32) for _ in range(2))
    ours = layers.layer_norm(16, 1e-6, jnp.float32, nnx.Rngs(0), bias=bias)
    theirs = nnx.LayerNorm(16, use_bias=bias, rngs=nnx.Rngs(0))
    ours.scale[...] = theirs.scale[...] = jnp.asarray(rng.normal(1, 0.3, 16), jnp.float32)

    def results(norm):
        definition, parameters = nnx.split(norm)
        run = jax.vjp(lambda p, x: nnx.merge(definition, p)(x), parameters, x)
        return jax.tree.leaves((run[0], run[1](gradient)))

    for a, b in zip(results(ours), results(theirs), strict=True):
        assert np.linalg.norm(a - b) <= 1e-5 * np.linalg.norm(b)


def test_layer_norm_takes_its_statistics_in_float32_from_bfloat16_tokens():
    x = jnp.asarray(np.random.default_rng(0).normal(3, 1, (2, 512)), jnp.bfloat16)
    exact = np.asarray(x, np.float64)
    expected = (exact - exact.mean(-1, keepdims=True)) / np.sqrt(
        exact.var(-1, keepdims=True) + 1e-6
    )
    norm = layers.layer_norm(512, 1e-6, jnp.bfloat16, nnx.Rngs(0))
    # Only the result is rounded, to 8 bits.
    np.testing.assert_allclose(np.asarray(norm(x), np.float64), expected, rtol=2**-8, atol=1e-5)


@pytest.mark.parametrize("mean", [0, 3])
def test_products_with_normed_tokens_and_their_gradients_are_those_of_the_norm(mean):
    rng = np.random.default_rng(0)
    shapes = ((2, 5, 16), (16,), (16,), (2, 3, 16), (2, 5, 3))
    x, scale, bias, vectors, gradient = (
        jnp.asarray(rng.normal(mean if i == 0 else 0.5, 1, shape), jnp.float32)
        for i, shape in enumerate(shapes)
    )

    def normed_first(x, scale, bias, vectors):
        y = norms.layer_norm(x, scale, bias, epsilon=1e-6, dtype=jnp.float32)
        return jnp.einsum("bnd,bqd->bnq", y, vectors)

    def ours(*arguments):
        return norms.layer_norm_product(*arguments, epsilon=1e-6)

    def results(function):
        value, back = jax.vjp(function, x, scale, bias, vectors)
        return [value, *back(gradient)]

    for a, b in zip(results(ours), results(normed_first), strict=True):
        assert np.linalg.norm(a - b) <= 3e-6 * np.linalg.norm(b)


def test_the_rms_norm_and_its_gradients_are_those_of_the_formula():
    rng = np.random.default_rng(0)
    x, gradient = (jnp.asarray(rng.normal(3, 2, (2, 5, 16)), jnp.float32) for _ in range(2))
    scale = jnp.asarray(rng.normal(1, 0.3, 16), jnp.float32)

    def formula(scale, x):
        return x / jnp.sqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5) * scale

    def ours(scale, x):
        return norms.rms_norm(x, scale, epsilon=1e-5, dtype=jnp.float32)

    (a, da), (b, db) = (jax.vjp(function, scale, x) for function in (ours, formula))
    found, expected = ([value, *back(gradient)] for value, back in ((a, da), (b, db)))
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
