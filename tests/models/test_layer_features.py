"""Features of layers inside a step: gradients, names, and families that do not say where their patches are."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.models.conftest import config, parameters
from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier, contract, layer_features, layout, registry
from vit_jax.models.contract import ModelOutput


class Guest(nnx.Module):
    """A family from outside without `grid` and without `last_norm`."""

    def __init__(self, has_layers=True):
        self.config, self.has_layers = SimpleNamespace(), has_layers

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        tokens = images.reshape(len(images), -1, 3)
        found = {"blocks": jnp.stack([tokens, 2 * tokens])} if self.has_layers else {}
        return ModelOutput(None, tokens.mean(1), tokens, contract.captured(capture, **found))


def test_gradients_reach_the_layers_that_are_asked_for():
    definition = registry.abstract(config())[0]
    images = np.random.default_rng(0).normal(size=(2, 12, 12, 3)).astype(np.float32)

    @jax.jit
    @jax.grad
    def gradient(params):
        model = nnx.merge(definition, params)
        output, (first, last) = layer_features.compute(model, images, (0, -1), norm=False)
        assert output.intermediates == {} and first.map.shape == (2, 3, 3, 16)
        return jnp.sum(jnp.sin(first.map)) + 0 * jnp.sum(last.map)

    of_layers = gradient(parameters(config()))["encoder"]["layers"]["mlp"]["up"]["kernel"]
    found = np.abs(of_layers).max((1, 2))
    assert found[0] > 1e-3 and not found[1:].any()


def test_layers_that_do_not_exist_are_refused_with_those_that_do():
    for layer, message in (
        (3, r"there is no layer 3: the model has 3, 0 to 2 \(blocks/0, blocks/1, blocks/2\)"),
        (-4, "there is no layer -4"),
        ("block/1", "did you mean 'blocks/1'.* the model has blocks/0, blocks/1, blocks/2"),
    ):
        with pytest.raises(ConfigError, match=message):
            layer_features.check_layers(config(), (layer,))
    assert layer_features.check_layers(config(), (0, -1, "blocks/1")) == (
        "blocks/0",
        "blocks/2",
        "blocks/1",
    )


def test_a_family_without_a_grid_gives_tokens_but_no_maps():
    images = jnp.ones((1, 2, 2, 3))
    _, (layer,) = layer_features.compute(Guest(), images, [-1])
    assert layer.tokens.shape == (1, 4, 3) and float(layer.tokens.max()) == 2  # no norm is known
    for name in ("map", "patches"):
        with pytest.raises(ConfigError, match="has no grid .* the patches of blocks/1"):
            getattr(layer, name)
    with pytest.raises(ConfigError, match="there is no layer 0: .* its family gives none"):
        layer_features.compute(Guest(has_layers=False), images, [0])

    @dataclasses.dataclass(frozen=True)
    class Gridless(classifier.ClassifierConfig):
        pass

    with pytest.raises(ConfigError, match="Gridless has no grid"):
        layout.grid(Gridless(8))
