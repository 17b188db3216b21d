"""Layers with state that is not trained, in a stack and alone; what loops do is in test_encoder."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from vit_jax.compute import stack

COUNT = 3


class Mean(nnx.Variable):
    """A running mean."""


class Layer(nnx.Module):
    """x · scale, and the mean of all x that it has seen."""

    def __init__(self, rngs: nnx.Rngs):
        self.scale = nnx.Param(jax.random.normal(rngs.params(), (4,)))
        self.mean = Mean(jnp.zeros(4))

    def __call__(self, x):
        self.mean[...] = 0.5 * self.mean[...] + 0.5 * x.mean(0)
        return x * self.scale[...]


@pytest.fixture
def layers():
    return stack.stack(Layer, COUNT, nnx.Rngs(0))


X = jnp.asarray(np.random.default_rng(0).normal(1, 1, (5, 4)), jnp.float32)


def run(layers, x, **options):
    """The result and the means, as a pure function gives them."""
    definition, state = nnx.split(layers)

    def pure(state, x):
        merged = nnx.merge(definition, state)
        step = lambda layer, x: (layer(x), {"inputs": x})  # noqa: E731
        x, captured = stack.scan(step, merged, x, **options)
        return x, captured["inputs"], merged.mean[...]

    return jax.jit(pure)(state, x)


@pytest.mark.parametrize(("remat", "unroll"), [("none", 1), ("none", 0), ("full", 1), ("full", 2)])
def test_state_that_is_not_trained_is_each_layers_own_and_updated(layers, remat, unroll):
    layers.mean[...] = jnp.arange(COUNT * 4.0).reshape(COUNT, 4)
    _, inputs, means = run(layers, X, remat=remat, unroll=unroll)
    expected = 0.5 * layers.mean[...] + 0.5 * inputs.mean(1)
    np.testing.assert_allclose(means, expected, rtol=1e-6)


def test_no_gradient_goes_through_state_that_is_not_trained(layers):
    def total_of_means(x):
        return run(layers, x, remat="full", unroll=1)[2].sum()

    assert not jax.grad(total_of_means)(X).any()


def test_a_layer_alone_is_updated_too():
    definition, state = nnx.split(Layer(nnx.Rngs(0)))

    def pure(state):
        layer = nnx.merge(definition, state)
        stack.call(layer, X, remat="full")
        return layer.mean[...]

    np.testing.assert_allclose(jax.jit(pure)(state), 0.5 * X.mean(0), rtol=1e-6)


def test_layers_without_such_state_return_none_from_the_loop(layers):
    del layers.mean

    def step(layer, x):
        return x * layer.scale[...], None

    program = jax.make_jaxpr(lambda x: stack.scan(step, layers, x, remat="none", unroll=1)[0])(X)
    (loop,) = [one for one in program.eqns if one.primitive.name == "scan"]
    assert [variable.aval.shape for variable in loop.outvars] == [X.shape]
