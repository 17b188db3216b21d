"""Flax's tree mode, which will be its default (`NNX_GRAPH_MODE=false NNX_GRAPH_UPDATES=false`): modules without shared
references. Every family is made and computed in it as in graph mode.
"""

import os
import pathlib
import subprocess
import sys

import flax
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from tests.models.test_contract import BATCH, COMMON, TINY
from tests.repeats import slow_unless
from vit_jax.base import sizes
from vit_jax.models import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]


FLAGS = ("nnx_graph_mode", "nnx_graph_updates")


@pytest.fixture
def tree_mode():
    """`tree_mode()` turns it on until the test ends."""
    before = {name: getattr(flax.config, name) for name in FLAGS}
    yield lambda: [flax.config.update(name, False) for name in FLAGS]
    for name, value in before.items():
        flax.config.update(name, value)


def traced(family: str) -> tuple[list, str]:
    """Names, shapes and dtypes of a tiny model's arrays, and the program of its training and its evaluation."""
    name, options, _ = TINY[family]
    config = registry.model_config(name, **COMMON | options)
    definition, state = nnx.split(nnx.eval_shape(lambda: registry.build(config, rngs=nnx.Rngs(0))))
    images = jax.ShapeDtypeStruct((BATCH, *sizes.height_width(config.image_size), 3), jnp.float32)

    def answer(state, images, key):
        model = nnx.merge(definition, state)
        trained = model(images, deterministic=False, rngs=nnx.Rngs(dropout=key))
        return trained.logits, model(images).logits

    arrays = [(path, leaf.shape, leaf.dtype) for path, leaf in nnx.to_flat_state(state)]
    return arrays, str(jax.make_jaxpr(answer)(state, images, jax.random.key(0)))


# Lists of lists, statistics, shared parts, branches and random projections; the others are made of the same.
QUICK = ("vit", "resnet", "efficientnet", "t2t", "crossvit", "dynamic_vit")


@pytest.mark.parametrize("family", slow_unless(QUICK, TINY))
def test_a_model_is_the_same_program_in_tree_mode(family, tree_mode):
    expected = traced(family)
    tree_mode()
    assert traced(family) == expected


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests",
    ["tests/models", "tests/test_api.py", "tests/training", "tests/integration/test_train.py"],
)
def test_what_uses_nnx_passes_in_tree_mode(tests):
    environment = os.environ | {"NNX_GRAPH_MODE": "false", "NNX_GRAPH_UPDATES": "false"}
    command = [sys.executable, "-m", "pytest", "-q", tests]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:]
