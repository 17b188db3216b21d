"""Every option of every family, one at a time, through every writer: what is written computes what was written, or the
writer refuses it by name. Nothing that a format leaves unsaid gets lost.
"""

import dataclasses

import jax
import numpy as np
import pytest

from tests.models.conftest import parameters, statistics
from tests.models.conftest import run as forward
from tests.models.test_contract import tiny
from tests.repeats import slow_unless
from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError, UserError
from vit_jax.interchange import formats
from vit_jax.interchange.conversions.table import CONVERSIONS
from vit_jax.models import registry
from vit_jax.models.preprocessing import Preprocessing

HALF = (0.5, 0.5, 0.5)
FILES = {"official": "model.npz", "big_vision": "model.npz", "authors": "model.safetensors"}
# Families of which timm builds published sizes alone: a file holds others.
NOT_TINY = ("hybrid", "mixer", "resnet", "efficientnet")
# How many options with other values are written, and computed alike, by family and format: no change makes it fewer.
WRITTEN = {
    ("vit", "official"): 30, ("vit", "big_vision"): 32, ("vit", "timm"): 61, ("vit", "huggingface"): 32,
    ("hybrid", "official"): 33, ("hybrid", "timm"): 64, ("mixer", "official"): 14, ("mixer", "big_vision"): 14,
    ("mixer", "timm"): 14, ("resnet", "big_vision"): 8, ("resnet", "timm"): 7, ("deepvit", "authors"): 15,
    ("localvit", "authors"): 19, ("crossvit", "authors"): 13, ("crossvit", "timm"): 13, ("cait", "timm"): 15,
    ("t2t", "authors"): 27, ("feed_forward", "authors"): 15,
}  # fmt: skip


def other_values(config, field: dataclasses.Field) -> list:
    """Values of an option that are not those of the config."""
    value = getattr(config, field.name)
    if field.metadata["choices"]:
        return [choice for choice in field.metadata["choices"] if choice != value]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value or 2]
    if isinstance(value, float):
        return [2 * value or 0.5]
    return []


def changed_configs(config) -> dict:
    """The config with each option set to each other value that the family takes, and as it is."""
    configs = {"as it is": config}
    for field in schema.options(type(config)):
        if field.metadata["role"] == "compute" or field.name == "dtype":
            continue
        for value in other_values(config, field):
            try:
                changed = dataclasses.replace(config, **{field.name: value})
                registry.abstract_weights(changed)
            except (UserError, ValueError):  # does not fit the other options
                continue
            configs[f"{field.name}={value!r}"] = changed
    return configs


def base_of(family: str, form: str):
    """A tiny model of a family that computes as the code of the format does."""
    config = tiny(family)
    conversion = CONVERSIONS[family][form].of(config)
    conventions = conversion.conventions | getattr(conversion, "file_conventions", {})
    if form == "timm" and hasattr(config, "epsilons"):
        conventions |= {"epsilons": "timm"}
    known = {name: value for name, value in conventions.items() if hasattr(config, name)}
    return dataclasses.replace(config, **known)


def checkpoint_of(config) -> formats.LoadedCheckpoint:
    prepared = Preprocessing(config.image_size, HALF, HALF)
    return formats.LoadedCheckpoint(
        config, parameters(config), None, prepared, {}, statistics(config)
    )


def logits(config, params) -> np.ndarray:
    images = np.random.default_rng(2).uniform(-1, 1, (2, *config.height_width, config.channels))
    return forward(config, params, images.astype(np.float32)).logits


def computes_the_same(config, path) -> bool:
    """Whether a file gives the logits of the model that was written, both of random weights."""
    told = [name for name in ("heads", "pool") if hasattr(config, name)]  # not by tensors
    hints = {name: getattr(config, name) for name in told}
    read = formats.read_checkpoint(path, image_size=config.image_size, hints=hints)
    theirs = jax.tree.map(np.asarray, read.params)
    np.testing.assert_allclose(
        logits(read.model_config, theirs), logits(config, parameters(config)), atol=1e-5
    )
    return True


PAIRS = [(family, form) for family, forms in CONVERSIONS.items() for form in forms]


@pytest.mark.parametrize("family, form", slow_unless([("vit", "official")], PAIRS))
def test_every_option_is_written_so_that_it_is_computed_or_refused(tmp_path, family, form):
    written = 0
    for number, (option, config) in enumerate(changed_configs(base_of(family, form)).items()):
        only_file = form == "timm" and family in NOT_TINY
        name = "model.safetensors" if only_file else FILES.get(form, "model")
        path = tmp_path / str(number) / name
        path.parent.mkdir()
        try:
            formats.write_checkpoint(checkpoint_of(config), path, form)
        except CheckpointError:
            assert not path.exists(), option
            continue
        assert computes_the_same(config, path), option
        written += 1
    assert written >= WRITTEN.get((family, form), 0)
