"""Products with operands in bfloat16 and sums in float32, against float64."""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.repeats import slow_unless
from vit_jax.compute import dense
from vit_jax.models import registry

BFLOAT16_ROUNDING = 2.0**-8


@pytest.fixture
def operands():
    """x (B, N, D) bfloat16, kernel (D, T, F), bias (T, F) float32, and a gradient (B, N, T, F)."""
    random = np.random.default_rng(0)
    shapes = (3, 50, 32), (32, 3, 24), (3, 24), (3, 50, 3, 24)
    x, kernel, bias, gradient = (random.standard_normal(s, np.float32) for s in shapes)
    return jnp.bfloat16(x), jnp.asarray(kernel), jnp.asarray(bias), jnp.bfloat16(gradient)


def float64(array):
    return np.asarray(array.astype(jnp.float32), np.float64)


def relative_error(found, exact):
    return np.abs(float64(found) - exact).max() / np.abs(exact).max()


def test_the_product_of_bfloat16_operands_is_rounded_once(operands):
    x, kernel, bias, _ = operands
    found = jax.jit(dense.dense)(x, kernel, bias)
    rounded = float64(kernel.astype(jnp.bfloat16))
    exact = np.einsum("bnd,dtf->bntf", float64(x), rounded) + float64(bias)
    assert found.dtype == jnp.bfloat16
    assert relative_error(found, exact) <= BFLOAT16_ROUNDING


@pytest.mark.parametrize("features", [24, 4, 1])  # more than those of x together, fewer, one
def test_gradients_of_kernel_and_bias_are_summed_in_float32_and_not_rounded(operands, features):
    x, *wide = operands
    kernel, bias, gradient = (array[..., :features] for array in wide)
    primals = x, kernel, bias
    found = jax.jit(lambda *p: jax.vjp(dense.dense, *p)[1](gradient))(*primals)
    x, g, kernel = float64(x), float64(gradient), float64(jnp.bfloat16(kernel))
    assert [array.dtype for array in found] == [jnp.bfloat16, jnp.float32, jnp.float32]
    assert relative_error(found[0], np.einsum("bntf,dtf->bnd", g, kernel)) <= BFLOAT16_ROUNDING
    assert relative_error(found[1], np.einsum("bnd,bntf->dtf", x, g)) <= 1e-6
    assert relative_error(found[2], g.sum((0, 1))) <= 1e-6


def test_without_a_bias(operands):
    x, kernel, bias, _ = operands
    found = dense.dense(x, kernel, None)
    np.testing.assert_array_equal(found, dense.dense(x, kernel, 0 * bias))


@pytest.mark.parametrize("features", [24, 4, 1])
def test_gradients_in_float32_are_those_in_float64(operands, features):
    x, *wide = operands
    arrays = x, *(array[..., :features] for array in wide)
    *primals, gradient = (array.astype(jnp.float32) for array in arrays)
    found = jax.jit(lambda *p: jax.vjp(dense.dense, *p)[1](gradient))(*primals)
    x, kernel, _, g = (float64(array) for array in (*primals, gradient))
    assert relative_error(found[0], np.einsum("bntf,dtf->bnd", g, kernel)) <= 1e-6
    assert relative_error(found[1], np.einsum("bnd,bntf->dtf", x, g)) <= 1e-6
    assert relative_error(found[2], g.sum((0, 1))) <= 1e-6


@pytest.mark.parametrize(
    "formula",
    ["bqhc,bnhc->bhqn", "bhqn,bnhc->bqhc", "bhqn,bqhc->bnhc", "bqhc,bqhc->bhq", "bnhc,mc->bnhm"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_product_is_the_einsum_in_float64(formula, dtype):
    sizes = dict(b=2, q=5, n=7, h=3, c=8, m=4)
    random = np.random.default_rng(0)
    shapes = ([sizes[axis] for axis in axes] for axes in formula.split("->")[0].split(","))
    a, b = (jnp.asarray(random.standard_normal(shape), dtype) for shape in shapes)
    found = jax.jit(functools.partial(dense.product, formula))(a, b)
    assert found.dtype == jnp.float32
    assert relative_error(found, np.einsum(formula, float64(a), float64(b))) <= 1e-6


@pytest.mark.parametrize(
    ("name", "remat"),
    # Each model once, and recomputed layers once.
    slow_unless(
        [("ViT-Ti/16", "auto"), ("Mixer-S/32", "none")],
        list(itertools.product(("ViT-Ti/16", "Mixer-S/32"), ("none", "auto"))),
    ),
)
def test_the_compiler_converts_no_product_of_a_bfloat16_model_to_float32(name, remat):
    options = dict(image_size=64, depth=2, num_classes=8, dtype="bfloat16", remat=remat)
    config = registry.model_config(name, **options)
    definition, like = registry.abstract(config)

    def loss(parameters, images):
        return jnp.square(nnx.merge(definition, parameters)(images).logits).sum()

    images = jax.ShapeDtypeStruct((4, 64, 64, 3), jnp.bfloat16)
    program = jax.jit(jax.grad(loss)).lower(like, images).compile().as_text()
    types = dict(re.findall(r"%(\S+) = (\w+)\[", program))
    operands = re.findall(r" dot\(%(\S+), %(\S+)\)", program)
    in_float32 = [pair for pair in operands if "f32" in (types[pair[0]], types[pair[1]])]
    assert len(operands) > (20 if remat == "none" else 15)
    # Of the head are three, which must not be rounded.
    assert len(in_float32) == 3


@pytest.mark.parametrize(
    ("dtype", "rounding"), [("float32", 1e-6), ("bfloat16", BFLOAT16_ROUNDING)]
)
def test_logits_are_float32_and_their_gradient_is_rounded_as_the_operands_are(
    operands, dtype, rounding
):
    x, kernel = operands[0].astype(dtype), operands[1].reshape(32, -1).astype(dtype)
    gradient = operands[3].reshape(3, 50, -1).astype(jnp.float32)
    logits, back = jax.vjp(dense.to_float32, x, kernel)
    assert logits.dtype == jnp.float32
    exact = float64(x) @ float64(kernel)
    assert relative_error(logits, exact) <= 1e-6
    of_x, of_kernel = back(gradient)
    assert of_x.dtype == of_kernel.dtype == dtype
    assert relative_error(of_x, float64(gradient) @ float64(kernel).T) <= rounding
    expected = np.einsum("bnd,bnf->df", float64(x), float64(gradient))
    assert relative_error(of_kernel, expected) <= rounding
