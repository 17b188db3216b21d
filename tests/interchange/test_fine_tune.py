"""What `configs/finetune.py` and its relatives start from: the model that a file holds, whatever it
is, at another resolution.
"""

import itertools

import jax
import numpy as np
import pytest

from tests.repeats import slow_unless
from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.interchange import formats, loading, resolving
from vit_jax.models import registry
from vit_jax.objectives.networks import model_config_of
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import resolve


def taken_over(recipe, path, **data):
    config = load_config(f"configs/{recipe}.py")
    config.init_from = str(path)
    config.data.update(data)
    return resolve(config, "no_run_was_begun_here")


FAMILIES = [
    "vt_vit_tok_rep",
    "bv_vit_map_sincos2d",
    "vt_mixer_tiny",
    "vt_hybrid_tiny",
    "bv_bit_tiny",
]
RECIPES = ["finetune", "linear_probe", "bit_hyperrule"]


# Every family by one recipe, every recipe with one.
@pytest.mark.parametrize(
    ("name", "recipe"),
    slow_unless(
        [
            *((name, "finetune") for name in FAMILIES),
            *((FAMILIES[0], recipe) for recipe in RECIPES),
        ],
        [*itertools.product(FAMILIES, RECIPES)],
    ),
)
def test_any_family_is_fine_tuned_at_twice_its_resolution(recipe, name, shared_data):
    path = shared_data / "oracle" / f"{name}.ckpt.npz"
    checkpoint = formats.read_checkpoint(path)
    size = 2 * checkpoint.model_config.image_size
    config = taken_over(recipe, path, image_size=size, train_crop="resize", eval_crop="resize")
    model_config = model_config_of(config, num_classes=5)
    assert type(model_config) is type(checkpoint.model_config)
    assert (model_config.image_size, model_config.num_classes) == (size, 5)
    fresh = jax.tree.map(
        lambda x: jax.numpy.zeros(x.shape, x.dtype), registry.abstract_weights(model_config)[1]
    )
    params, _ = loading.fit_weights(
        formats.read_checkpoint(path, hints=vars(model_config)),
        fresh,
        model_config,
        reset=config.init_reset,
        resize=config.init_resize,
    )
    old, new = (
        dict(zip(patterns.names(tree), jax.tree.leaves(tree), strict=True))
        for tree in (checkpoint.params, params)
    )
    assert not new["head/kernel"].any() and "representation/kernel" not in new
    same = [n for n in new if n in old and old[n].shape == new[n].shape and "head" not in n]
    # All but heads, position embeddings and the MLPs that a Mixer has over tokens.
    assert len(same) >= len(new) - 2 - (1 if "position" in new else 4 * ("mixer" in name))
    for tensor in same:
        np.testing.assert_array_equal(new[tensor], np.asarray(old[tensor]), err_msg=tensor)
    frozen = patterns.matching(config.optim.freeze, new)
    assert set(new) - set(frozen) == (
        {"head/kernel", "head/bias"} if recipe == "linear_probe" else set(new)
    )


IMAGENET = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def test_mean_and_deviation_are_those_the_checkpoint_says(shared_data, tmp_path):
    official = shared_data / "oracle" / "vt_vit_testing.ckpt.npz"
    assert taken_over("finetune", official, image_size=32).data.mean == (0.5, 0.5, 0.5)
    checkpoint = formats.read_checkpoint(official)
    checkpoint.preprocessing = formats.Preprocessing(checkpoint.model_config.image_size, **IMAGENET)
    formats.write_checkpoint(checkpoint, tmp_path / "folder", "huggingface")
    data = taken_over("finetune", tmp_path / "folder", image_size=32).data
    assert (data.mean, data.std) == tuple(IMAGENET.values())
    half = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
    said = taken_over("finetune", tmp_path / "folder", image_size=32, **half).data
    assert said.mean == said.std == (0.5, 0.5, 0.5)


def test_interpolation_is_the_checkpoints_and_a_run_keeps_what_it_took(shared_data, tmp_path):
    official = shared_data / "oracle" / "vt_vit_testing.ckpt.npz"
    assert taken_over("finetune", official, image_size=32).data.interpolation == "bilinear"
    checkpoint = formats.read_checkpoint(official)
    formats.write_checkpoint(
        checkpoint, tmp_path / "begun", "orbax"
    )  # stands for a run of an earlier version
    size = checkpoint.model_config.image_size
    checkpoint.preprocessing = formats.Preprocessing(size, interpolation="bicubic")
    formats.write_checkpoint(checkpoint, tmp_path / "folder", "huggingface")
    assert (
        taken_over("finetune", tmp_path / "folder", image_size=32).data.interpolation == "bicubic"
    )
    config = load_config("configs/finetune.py")
    config.init_from = str(tmp_path / "folder")
    resumed = resolving.resolve_from_checkpoint(config, tmp_path / "begun")
    assert resumed.data.interpolation == "bilinear"


def test_a_file_that_does_not_say_how_images_are_normalised_needs_to_be_told(shared_data):
    path = next((shared_data / "weights").glob("deit_tiny*.safetensors"))
    with pytest.raises(
        ConfigError, match="does not say how images are normalised: set config.data"
    ):
        taken_over("finetune", path)
    model = model_config_of(taken_over("finetune", path, **IMAGENET), num_classes=20)
    assert (model.width, model.depth, model.activation) == (192, 12, "gelu")


@pytest.mark.parametrize(
    "left_open",
    [{"model.name": ""}, {"data.mean": ()}, {"data.std": ()}, {"data.interpolation": ""}],
    ids=str,
)
def test_what_is_left_to_a_checkpoint_needs_one(left_open):
    config = load_config("configs/digits.py")
    config.update_from_flattened_dict(left_open)
    with pytest.raises(ConfigError, match="set --config.init_from=CHECKPOINT"):
        resolving.resolve_from_checkpoint(config, "no_run_was_begun_here")
