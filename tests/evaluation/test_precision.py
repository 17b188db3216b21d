"""Products that decide are exact in float32 on every device: their precision is part of what is lowered."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.data.options import Data
from vit_jax.devices import meshes
from vit_jax.evaluation.features import Features
from vit_jax.evaluation.forward import make_forward
from vit_jax.evaluation.neighbours import NeighbourOptions, _make_vote
from vit_jax.models import registry

CLASSES = 7
HIGHEST = "precision = [HIGHEST, HIGHEST]"
TINY = dict(width=16, depth=1, heads=2, mlp_dim=16, patch=8)
MODELS = {
    "ViT-Ti/16": TINY,
    "DeiT-Ti/16": TINY | {"distilled": True},
    "Mixer-S/16": dict(width=16, depth=1, mlp_dim=16, token_mlp_dim=16, patch=8),
    "CrossViT-Ti": {},
}


def products(lowered: str) -> list[str]:
    """The lines of matrix products."""
    return [line for line in lowered.splitlines() if "stablehlo.dot_general" in line]


@pytest.mark.parametrize("name", slow_unless(["DeiT-Ti/16"], MODELS))
def test_the_head_of_a_model_that_is_judged_is_exact(name):
    size = 240 if name.startswith("CrossViT") else 32
    config = registry.model_config(name, image_size=size, num_classes=CLASSES, **MODELS[name])
    definition, like = registry.abstract_weights(config)
    forward = make_forward(definition, config, Data(mean=(0.5,) * 3, std=(0.5,) * 3))
    images = jax.ShapeDtypeStruct((2, size, size, 3), np.uint8)
    text = jax.jit(lambda weights, x: forward(weights, x).logits).lower(like, images).as_text()
    heads = [line for line in products(text) if re.search(rf"-> tensor<2x{CLASSES}xf32>", line)]
    assert len(heads) == (1 if name in ("ViT-Ti/16", "Mixer-S/16") else 2)
    assert all(HIGHEST in line for line in heads)


def test_neighbours_and_their_votes_are_exact():
    mesh = meshes.replica_mesh()
    bank = Features(jnp.ones((1, 8, 4)), jnp.zeros((1, 8), jnp.int32), jnp.ones((1, 8)))
    queries = Features(jnp.ones((2, 4)), jnp.zeros(2, jnp.int32), jnp.ones(2))
    with jax.set_mesh(mesh):
        vote = _make_vote(NeighbourOptions(k=(3, 5)), 4, 8, mesh)
        lines = products(vote.lower(bank, queries).as_text())
    assert len(lines) == 3 and all(HIGHEST in line for line in lines)
