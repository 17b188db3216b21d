"""ViT-5 against the answers of its authors' code."""

import dataclasses
import functools

import numpy as np
import pytest

import vit_jax
from tests.interchange import test_timm
from tests.models import oracles
from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats, safetensors
from vit_jax.interchange.conversions import vit_5
from vit_jax.models import registry

# The second was built for 96 pixels and has a table for 64, which no tensor shows.
GRIDS = {"vit5_a": (4, 4), "vit5_rope_other_grid": (6, 6)}


@pytest.mark.parametrize("name", GRIDS)
def test_the_authors_answers_are_ours_and_their_file_comes_back(shared_data, tmp_path, name):
    path, tensors, answers, arguments = oracles.relative_of(shared_data, name)
    assert formats.detect(path) == "authors"
    checkpoint = formats.read_checkpoint(path, rope_grid=GRIDS[name])
    config = checkpoint.model_config
    assert (config.heads, config.rope_registers) == (arguments["num_heads"], arguments["reg_theta"])
    output = test_timm.our_output(checkpoint, answers["images"])
    np.testing.assert_allclose(output.logits, answers["logits"], atol=1e-5)
    np.testing.assert_allclose(output.features, answers["features"], atol=1e-5)
    # Theirs has the registers behind the patches.
    np.testing.assert_allclose(output.tokens[:2], answers["tokens"][:, :-4], atol=1e-5)

    formats.write_checkpoint(checkpoint, tmp_path / "again.safetensors", "authors")
    again = safetensors.read(tmp_path / "again.safetensors")[0]
    assert sorted(again) == sorted(tensors)
    for each in again:
        assert np.asarray(again[each]).tobytes() == tensors[each].tobytes(), each
    assert formats.read_checkpoint(tmp_path / "again.safetensors").model_config == config


def test_the_grid_of_the_rotations_is_asked_for_where_a_file_may_be_fine_tuned(shared_data):
    path, tensors, _, _ = oracles.relative_of(shared_data, "vit5_rope_other_grid")
    with pytest.raises(
        CheckpointError, match=r"(?s)rope_grid: .* '\(4, 4\)' unless .*--model=rope_grid"
    ):
        formats.read_checkpoint(path)
    # Larger images spread the places of that grid.
    larger = vit_jax.load(path, image_size=96, rope_grid=(4, 4)).config
    assert (larger.grid, larger.rope_grid) == ((6, 6), (4, 4))
    shapes = {name: tensor.shape for name, tensor in tensors.items()}
    for width, side, is_asked in [(384, 14, False), (768, 12, False), (768, 24, True)]:
        of_size = shapes | {
            "patch_embed.proj.weight": (width, 3, 16, 16), "pos_embed": (1, side**2, width),
            "blocks.0.attn.rope.freqs": (16,),
        }  # fmt: skip
        detected = vit_5.Authors().recognise(of_size, {})
        assert detected.options["rope_grid"] == (side, side)
        assert ("have (12, 12)" in detected.open["rope_grid"].ask) == is_asked


def test_frequencies_that_the_options_do_not_give_are_refused(shared_data, tmp_path):
    path, tensors, answers, _ = oracles.relative_of(shared_data, "vit5_a")
    read = functools.partial(formats.read_checkpoint, rope_grid=GRIDS["vit5_a"])
    with pytest.raises(CheckpointError, match=r"rope_reg.freqs.*set rope_registers"):
        read(path, rope_registers=50.0)
    name = "blocks.1.attn.rope.freqs"
    steps = np.arange(4) / 4
    changed = tensors | {f"blocks.{i}.attn.rope.freqs": 200.0**-steps for i in range(2)}
    np.savez(tmp_path / "a.npz", **changed)
    with pytest.raises(CheckpointError, match="freqs is .*set rope_theta"):
        read(tmp_path / "a.npz")
    assert read(tmp_path / "a.npz", rope_theta=200.0).model_config.rope_theta == 200
    np.savez(tmp_path / "b.npz", **tensors | {name: tensors[name][:3]})
    with pytest.raises(CheckpointError, match=rf"{name}: \(3,\) in the file, \(4,\) in the model"):
        read(tmp_path / "b.npz")


def test_only_a_vit_5_is_written_and_timm_has_none(shared_data, tmp_path):
    path = oracles.relative_of(shared_data, "vit5_a")[0]
    checkpoint = formats.read_checkpoint(
        path, activation="gelu_tanh", rope_grid=(4, 4)
    )  # the official code's
    for form, words in {
        "timm": "rotate registers",
        "official": "rope",
        "huggingface": "rope",
    }.items():
        with pytest.raises(CheckpointError, match=words):
            formats.write_checkpoint(checkpoint, tmp_path / form, form)
    config = registry.model_config("ViT-mu/16", image_size=32, num_classes=2, activation="gelu")
    other = formats.LoadedCheckpoint(config, {})
    with pytest.raises(CheckpointError, match="differs in .*rope='none'.*--to=timm"):
        formats.write_checkpoint(other, tmp_path / "other.safetensors", "authors")
    # Before what SigLIP computes with is: no option gives a model a text tower.
    tower = formats.LoadedCheckpoint(dataclasses.replace(config, num_classes=0, pool="map"), {})
    with pytest.raises(CheckpointError, match="beside a text tower"):
        formats.write_checkpoint(tower, tmp_path / "tower.safetensors", "authors")


def test_registers_are_rotated_only_as_a_square_beside_axial_patches():
    options = dict(image_size=sizes.parse(32), num_classes=2)
    for wrong in ({"registers": 3, "rope": "axial"}, {"registers": 4}, {"rope": "axial"}):
        with pytest.raises(ConfigError, match="model.rope_registers=100 rotates"):
            registry.model_config("ViT-mu/16", rope_registers=100.0, **options, **wrong)
