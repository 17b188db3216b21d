"""Checkpoints of images that are no squares or have other channels: read, written, and fitted."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy
import scipy.ndimage

import vit_jax
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import fitting, formats, loading
from vit_jax.models import registry

from .conftest import run

POSITION = "Transformer/posembed_input/pos_embedding"


def zoomed(table, old, new):
    """big_vision's and the official code's rule: linear, corners aligned (vit.py:319)."""
    grid = table.reshape(*old, table.shape[-1])
    factors = (new[0] / old[0], new[1] / old[1], 1)
    return scipy.ndimage.zoom(grid, factors, order=1).reshape(-1, table.shape[-1])


@pytest.mark.parametrize("size, grid", [((6, 10), (3, 5)), ("10x4", (5, 2)), ((2, 14), (1, 7))])
def test_positions_go_from_a_square_to_any_rectangle_by_the_official_rule(file, arrays, size, grid):
    model = vit_jax.load(file, image_size=size)
    assert model.config.grid == grid
    expected = zoomed(arrays[POSITION][0, 1:], (3, 3), grid)
    np.testing.assert_allclose(model.position[0, 1:], expected, atol=1e-6)
    np.testing.assert_array_equal(model.position[0, 0], arrays[POSITION][0, 0])


def rectangle(name="ViT-mu/2", **options):
    """A model for images of 6 x 14 pixels with random weights."""
    sizes = dict(image_size=(6, 14), depth=2, width=8, heads=2, mlp_dim=12, num_classes=5)
    config = registry.model_config(name, **sizes | options)
    rng = np.random.default_rng(3)
    params = patterns.map_named(
        lambda _, x: rng.normal(0, 0.5, x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    return formats.LoadedCheckpoint(config, params, None, formats.Preprocessing((6, 14)))


@pytest.mark.parametrize(
    ("to", "name", "says_its_size"),
    [
        ("official", "x.npz", False),
        ("big_vision", "x.npz", False),
        ("timm", "x.safetensors", True),
        ("timm", "folder", True),
        ("huggingface", "folder", True),
        ("orbax", "run", True),
    ],
)
def test_every_format_holds_models_of_rectangles(tmp_path, to, name, says_its_size):
    checkpoint = rectangle(activation="gelu")
    if to in ("official", "big_vision"):
        checkpoint = rectangle()
    path = tmp_path / name
    formats.write_checkpoint(checkpoint, path, to)
    if not says_its_size:
        with pytest.raises(CheckpointError, match="is no square grid, .*--model=image_size="):
            formats.read_checkpoint(path)
    found = formats.read_checkpoint(path, **({} if says_its_size else {"image_size": "6x14"}))
    assert (found.model_config.image_size, found.model_config.grid) == ((6, 14), (3, 7))
    if to != "big_vision":  # There the class token has taken its position in.
        assert found.model_config == checkpoint.model_config
        np.testing.assert_array_equal(found.params["position"], checkpoint.params["position"])
    # As it is loaded for the size that it has, nothing else need be said.
    assert vit_jax.load(path, image_size=(6, 14)).config.grid == (3, 7)
    again = tmp_path / f"again_{name}"
    formats.write_checkpoint(found, again, to)
    if to in ("official", "big_vision"):
        one, other = np.load(path), np.load(again)
        assert all(one[n].tobytes() == other[n].tobytes() for n in one.files)


def test_a_rectangle_whose_rows_are_a_square_number_is_one_if_its_size_is_said(tmp_path):
    """A class token and 3 x 5 patches are as many rows as 4 x 4."""
    formats.write_checkpoint(rectangle(image_size=(6, 10)), tmp_path / "x.npz", "official")
    with pytest.raises(CheckpointError, match="of 16 rows is no square grid"):
        formats.read_checkpoint(tmp_path / "x.npz")
    config = formats.read_checkpoint(tmp_path / "x.npz", image_size=(6, 10)).model_config
    assert config.grid == (3, 5) and config.position_of_class


def test_rows_that_fit_two_grids_are_asked_about_and_not_guessed(tmp_path):
    """2 x 7 patches are as many rows as 3 x 3 with a class token and 4 registers."""
    checkpoint = rectangle(
        image_size=(4, 14), registers=4, position_of_class=False, activation="gelu"
    )
    formats.write_checkpoint(checkpoint, tmp_path / "whole.safetensors", "timm")
    tensors = safetensors.numpy.load_file(tmp_path / "whole.safetensors")  # without our header
    safetensors.numpy.save_file(tensors, tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="may be 3 x 3 or 2 x 7 patches .*image_size="):
        vit_jax.load(tmp_path / "x.safetensors", image_size=(4, 14))
    stated = dict(heads=2, activation="gelu", pool="token")
    config = formats.read_checkpoint(
        tmp_path / "x.safetensors", image_size=(4, 14), **stated
    ).model_config
    assert config.grid == (2, 7) and not config.position_of_class and config.registers == 4


def test_a_rectangles_positions_go_to_another_rectangle(tmp_path):
    checkpoint = rectangle()
    formats.write_checkpoint(checkpoint, tmp_path / "run", "orbax")
    model = vit_jax.load(tmp_path / "run", image_size="10x6")
    expected = zoomed(np.asarray(checkpoint.params["position"])[0, 1:], (3, 7), (5, 3))
    np.testing.assert_allclose(model.position[0, 1:], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param("vt_vit_tok_rep", (1, 2), marks=pytest.mark.slow),
        pytest.param("vt_hybrid_tiny", (1, 2), marks=pytest.mark.slow),
        pytest.param("bv_vit_map_sincos2d", (2, 1), marks=pytest.mark.slow),
        pytest.param("bv_bit_tiny", (1, 2), marks=pytest.mark.slow),
        pytest.param("vt_mixer_tiny", (2, 2), marks=pytest.mark.slow),
    ],
)
def test_a_published_checkpoint_is_fine_tuned_on_panoramas(name, size, shared_data, tmp_path):
    """By the recipe and the command's own path, on images of other than its height or width."""
    path = shared_data / "oracle" / f"{name}.ckpt.npz"
    side = 64 if name == "bv_bit_tiny" else formats.read_checkpoint(path).model_config.image_size
    height, width = side * size[0], side * size[1]
    config = vit_jax.load_config("configs/finetune.py")
    config.update_from_flattened_dict({
        "init_from": str(path), "data.name": "digits", "data.image_size": f"{height}x{width}",
        "data.train_crop": "resize", "duration": "2 steps", "batch_size": 8, "accumulate": 1,
        "optim.warmup": "0", "optim.lr": 0.001, "optim.freeze": ("(?!head/).*",), "model.dtype": "float32",
        "log.tensorboard": False, "eval.every": "0", "checkpoint.every": "0", "data.train_split": "train[:8]",
        "data.eval_split": "test[:8]",
    })  # fmt: skip
    result = vit_jax.train(config, tmp_path / "run")
    assert result["step"] == 2
    trained = vit_jax.load_run(tmp_path / "run")
    assert trained.model.config.height_width == (height, width)
    before = vit_jax.load(path, image_size=(height, width), num_classes=10)
    if "position" in formats.read_checkpoint(path).params:
        np.testing.assert_array_equal(trained.model.position[...], before.position[...])


def test_a_mixer_refuses_what_its_token_weights_do_not_fit(shared_data):
    path = shared_data / "oracle" / "vt_mixer_tiny.ckpt.npz"
    with pytest.raises(ConfigError, match="do not fit images of 32x64 .*What fits is 32, 64, 96"):
        vit_jax.load(path, image_size="32x64")


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_the_first_kernel_spreads_its_mean_over_other_channels_and_keeps_their_sum(
    channels, file, arrays, images
):
    model = vit_jax.load(file, channels=channels, init_channels="mean")
    kernel = np.asarray(model.embedding.kernel[...])
    assert kernel.shape == (2, 2, channels, 8)
    np.testing.assert_allclose(kernel.sum(2), arrays["embedding/kernel"].sum(2), atol=1e-5)
    assert np.ptp(kernel, axis=2).max() == 0
    # To an image without colour it answers as before.
    grey = images.mean(-1, keepdims=True)
    np.testing.assert_allclose(
        run(model, np.repeat(grey, channels, -1)).logits,
        run(vit_jax.load(file), np.repeat(grey, 3, -1)).logits,
        atol=1e-5,
    )


@pytest.mark.parametrize("name", ["vt_hybrid_tiny", "vt_mixer_tiny", "bv_bit_tiny"])
def test_every_family_takes_other_channels(name, shared_data):
    path = shared_data / "oracle" / f"{name}.ckpt.npz"
    (kernel,) = formats.read_checkpoint(path).model_config.image_kernels
    model = vit_jax.load(path, channels=4, init_channels="mean")
    params = registry.split(model)[1].params
    assert (
        dict(zip(patterns.names(params), jax.tree.leaves(params), strict=True))[kernel].shape[-2]
        == 4
    )


def test_other_channels_without_a_rule_are_an_error_that_names_it(file):
    with pytest.raises(
        ConfigError, match="of 3 channels, the model .* 1. With init_channels='mean'"
    ):
        vit_jax.load(file, channels=1)
    config = registry.model_config(
        "ViT-mu/2", image_size=6, channels=1, depth=2, width=8, heads=2, mlp_dim=12, num_classes=5
    )
    like = registry.abstract_weights(config)[1]
    with pytest.raises(ConfigError, match="init_channels='mean'"):
        loading.fit_weights(formats.read_checkpoint(file, hints=vars(config)), like, config)
    reset = ("embedding/kernel",)  # What starts anew need not be fitted.
    like = jax.tree.map(lambda x: jax.numpy.zeros(x.shape, x.dtype), like)
    assert loading.fit_weights(
        formats.read_checkpoint(file, hints=vars(config)), like, config, reset=reset
    ).params


def test_spreading_is_done_in_float64_and_given_back_in_the_kernels_type():
    kernel = np.random.default_rng(0).normal(size=(2, 2, 3, 4)).astype(np.float32)
    spread = fitting.spread_channels(kernel, 6)
    assert spread.shape == (2, 2, 6, 4) and spread.dtype == np.float32
    np.testing.assert_allclose(spread[:, :, 0], kernel.sum(2) / 6, rtol=1e-6)


def test_images_of_other_channels_are_written_and_read_again(tmp_path):
    checkpoint = rectangle(channels=5, activation="gelu")
    formats.write_checkpoint(checkpoint, tmp_path / "x.safetensors", "timm")
    assert (
        formats.read_checkpoint(tmp_path / "x.safetensors").model_config == checkpoint.model_config
    )
    formats.write_checkpoint(checkpoint, tmp_path / "run", "orbax")
    data = vit_jax.load_run(tmp_path / "run").config.data
    assert (data.channels, data.image_size, data.mean) == (5, (6, 14), (0.5,) * 5)
    formats.write_checkpoint(checkpoint, tmp_path / "folder", "huggingface")
    said = json.loads((tmp_path / "folder" / "config.json").read_text())
    assert (said["num_channels"], said["image_size"]) == (5, [6, 14])
