"""Batch norm against PyTorch's: results, gradients and running statistics; over devices, in parts, in
runs.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tests.models import oracles
from vit_jax.base.errors import ConfigError
from vit_jax.compute import stack
from vit_jax.devices import meshes
from vit_jax.models import registry
from vit_jax.models.batch_norm import BatchNorm, FrozenLayers

CHANNELS = 3


@functools.partial(jax.jit, static_argnames=("axis", "training"))
def step(weights, x, dy, axis, training=True):
    """Results of a forward and a backward pass: y, gradients of (scale, bias, x), statistics after."""
    definition = registry.split(BatchNorm(CHANNELS, axis=axis))[0]

    def run(params, x):
        norm = nnx.merge(definition, params, weights.variables)
        y = norm(x, training=training)
        return y, registry.split(norm)[1].variables

    y, back, after = jax.vjp(run, weights.params, x, has_aux=True)
    return y, *back(dy), after


def new(axis, rng):
    weights = registry.split(BatchNorm(CHANNELS, axis=axis))[1]
    return jax.tree.map(lambda x: jnp.asarray(rng.uniform(0.5, 2, x.shape), x.dtype), weights)


def batch(rng, axis, dtype=jnp.float32):
    shape = (4, 5, 6, CHANNELS) if axis == -1 else (4, CHANNELS, 5, 6)
    return (jnp.asarray(rng.normal(2, 3, shape), dtype) for _ in range(2))


@pytest.mark.parametrize("axis", [-1, 1])
def test_three_steps_are_those_of_pytorch_and_so_is_what_is_computed_after_them(axis):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    weights = new(axis, rng)
    theirs = torch.nn.BatchNorm2d(CHANNELS)

    def channels_first(x):
        return torch.tensor(np.moveaxis(np.asarray(x), axis, 1))

    with torch.no_grad():
        for own, other in [
            ("scale", "weight"), ("bias", "bias"), ("mean", "running_mean"), ("var", "running_var"),
        ]:  # fmt: skip
            tree = weights.params if own in weights.params else weights.variables
            getattr(theirs, other).copy_(torch.tensor(np.asarray(tree[own])))
    for training in (True, True, True, False):
        theirs.train(training)
        x, dy = batch(rng, axis)
        y, dparams, dx, after = step(weights, x, dy, axis, training)
        input = channels_first(x).requires_grad_()
        theirs.zero_grad()
        output = theirs(input)
        output.backward(channels_first(dy))
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
        close(channels_first(y), output.detach())
        close(channels_first(dx), input.grad)
        # Sums over the batch, rounded at the size of the largest.
        oracles.assert_close(dparams["scale"], theirs.weight.grad.numpy())
        oracles.assert_close(dparams["bias"], theirs.bias.grad.numpy())
        close(after["mean"], theirs.running_mean)
        close(after["var"], theirs.running_var)
        # Descent, so that each step has other parameters.
        params = jax.tree.map(lambda p, g: p - 0.01 * g, weights.params, dparams)
        weights = registry.Weights(params, after)
        with torch.no_grad():
            for p in theirs.parameters():
                p -= 0.01 * p.grad


def test_statistics_are_of_the_batch_of_all_devices():
    rng = np.random.default_rng(0)
    weights, (x, dy) = new(-1, rng), batch(rng, -1)
    alone = step(weights, x, dy, -1)
    mesh = meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    x, dy = (jax.device_put(a, meshes.batch_sharding(mesh)) for a in (x, dy))
    with jax.set_mesh(mesh):
        over_all = step(weights, x, dy, -1)
    assert over_all[0].sharding.spec[0] == P(("data", "fsdp"))[0]
    for one, other in zip(*map(jax.tree.leaves, (over_all, alone)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_statistics_are_float32_where_the_batch_is_bfloat16():
    rng = np.random.default_rng(0)
    weights, (x, dy) = new(-1, rng), batch(rng, -1, jnp.bfloat16)
    half = step(weights, x, dy, -1)
    exact = step(weights, *(a.astype(jnp.float32) for a in (x, dy)), -1)
    assert half[0].dtype == half[2].dtype == jnp.bfloat16
    for one, other in zip(*map(jax.tree.leaves, (half[3], exact[3])), strict=True):
        assert one.dtype == jnp.float32
        np.testing.assert_allclose(one, other, rtol=1e-6)
    np.testing.assert_allclose(half[0].astype(jnp.float32), exact[0], rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_stacked_norms_keep_their_own_statistics_recomputed_or_not(remat):
    """The second of two layers sees what the first made; no gradient changes what is remembered."""
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, CHANNELS)), jnp.float32)
    layers = stack.stack(lambda rngs: BatchNorm(CHANNELS), 2, nnx.Rngs(0))
    definition, weights = registry.split(layers)

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def learn(params):
        layers = nnx.merge(definition, params, weights.variables)
        layer = lambda norm, x: (jnp.sin(norm(x, training=True)), None)  # noqa: E731
        y, _ = stack.scan(layer, layers, x, remat=remat, unroll=1)
        return y.sum(), registry.split(layers)[1].variables

    gradient, after = learn(weights.params)
    between = jnp.sin((x - x.mean(0)) / jnp.sqrt(x.var(0) + 1e-5))
    expected = [0.1 * x.mean(0), 0.1 * between.mean(0)]
    np.testing.assert_allclose(after["mean"], expected, rtol=1e-5, atol=1e-6)
    assert all(np.abs(leaf).max() > 1e-3 for leaf in jax.tree.leaves(gradient))


def test_one_value_for_each_channel_has_no_variance():
    norm = BatchNorm(CHANNELS)
    with pytest.raises(ConfigError, match=r"one value for each channel.* larger batch_size"):
        norm(jnp.zeros((1, CHANNELS)), training=True)
    assert norm(jnp.zeros((1, CHANNELS)), training=False).shape == (1, CHANNELS)


def test_a_frozen_norm_gives_what_it_gives_after_training_and_keeps_its_statistics():
    rng = np.random.default_rng(0)
    x, _ = batch(rng, -1)
    norm = nnx.merge(registry.split(BatchNorm(CHANNELS))[0], *new(-1, rng))
    exact, before = norm(x, training=False), np.asarray(norm.mean[...])
    norm.frozen = True
    np.testing.assert_array_equal(norm(x, training=True), exact)
    np.testing.assert_array_equal(norm.mean[...], before)
    assert norm(x[:1, :1, :1], training=True).shape == (1, 1, 1, CHANNELS)  # of one value too


def test_frozen_layers_of_a_stack_normalise_by_their_running_statistics_and_others_by_the_batch():
    x = jnp.asarray(np.random.default_rng(0).normal(2, 3, (8, CHANNELS)), jnp.float32)
    layers = stack.stack(lambda rngs: BatchNorm(CHANNELS), 2, nnx.Rngs(0))
    layers.frozen = FrozenLayers(jnp.array([True, False]))
    layer = lambda norm, x: (norm(x, training=True), None)  # noqa: E731
    y, _ = stack.scan(layer, layers, x, remat="none", unroll=1)
    np.testing.assert_allclose(y.mean(0), np.zeros(CHANNELS), atol=1e-5)
    np.testing.assert_array_equal(layers.mean[0], np.zeros(CHANNELS))
    between = x / np.sqrt(1 + 1e-5)  # the first layer's running mean is 0, its variance 1
    np.testing.assert_allclose(layers.mean[1], 0.1 * between.mean(0), rtol=1e-5)
