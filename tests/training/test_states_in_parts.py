"""Every array of the state after some steps whose batch is computed in parts, against the same run without parts."""

import jax.numpy as jnp
import numpy as np
import pytest

from tests.models.conftest import parameters
from tests.training.tiny_objectives import NEEDS, assembled, stepped
from vit_jax import objectives
from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats

STEPS = 3
# What makes a batch's loss the mean of its parts' losses, where there is a choice.
WITHOUT_CHANCE = {
    "dino": {"objective.patch_weight": 0.0, "objective.koleo": 0.0},
    "sum": {
        "objective.tokenizer": None, "model.head_init": "normal",
        "objective.terms": (("supervised", {}), ("distill", {"teacher": "{teacher}"})),
    },
}  # fmt: skip
# Only what counts steps is the same, and why.
OTHER_LOSSES = {
    "mae": "each part draws its own masks",
    "masked_patches": "each part draws its own masks",
    "segmentation": "each part draws the points that its masks are compared at",
}


@pytest.fixture(scope="session")
def teacher(tmp_path_factory):
    """A checkpoint of the tiny model, with a head."""
    folder = tmp_path_factory.mktemp("teacher") / "model"
    model_config = assembled("supervised", None, {}).model_config
    same = formats.Preprocessing(16, (0.5,) * 3, (0.5,) * 3)
    model = formats.LoadedCheckpoint(model_config, parameters(model_config), preprocessing=same)
    formats.write_checkpoint(model, folder, "orbax")
    return folder


def test_every_objective_is_tried():
    assert NEEDS.keys() == set(objectives.OBJECTIVES)


@pytest.mark.slow
@pytest.mark.parametrize("name", NEEDS)
def test_all_state_is_that_of_whole_batches(name, teacher):
    fields = WITHOUT_CHANCE.get(name, {}) | {"optim.ema": 0.5}
    if name == "image_text":  # an image is compared with all texts of its batch
        with pytest.raises(ConfigError, match="config.accumulate = 2"):
            assembled(name, teacher, {"accumulate": 2})
        return
    whole = stepped(assembled(name, teacher, fields), STEPS)
    parts = stepped(assembled(name, teacher, fields | {"accumulate": 2}), STEPS)
    assert whole.keys() == parts.keys()
    for array, expected in whole.items():
        is_count = not jnp.issubdtype(expected.dtype, jnp.floating)
        if is_count or name not in OTHER_LOSSES:
            np.testing.assert_allclose(parts[array], expected, rtol=1e-4, atol=1e-5, err_msg=array)
