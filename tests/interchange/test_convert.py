"""`vit_jax convert` and `init_from`: from one format to another and back, and into a run."""

import numpy as np
import pytest

import vit_jax
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats, loading, resolving
from vit_jax.models import registry
from vit_jax.recipes.user_files import load_config

from .conftest import run
from .test_load import ORACLE


@pytest.mark.parametrize("name", [*ORACLE, "bv_flexi_tiny"])
def test_an_official_file_comes_back_byte_by_byte(name, shared_data, tmp_path, same_arrays):
    path = shared_data / "oracle" / f"{name}.ckpt.npz"
    own = formats.detect(path)
    loading.convert(path, tmp_path / "same.npz", own)
    same_arrays(path, tmp_path / "same.npz")
    loading.convert(path, tmp_path / "run", "orbax")
    loading.convert(tmp_path / "run", tmp_path / "again.npz", own)
    same_arrays(path, tmp_path / "again.npz")


def test_the_other_code_base_gets_the_same_logits(file, images, expected, tmp_path):
    loading.convert(file, tmp_path / "bv.npz", "big_vision")
    loading.convert(tmp_path / "bv.npz", tmp_path / "vt.npz", "official")
    assert np.load(tmp_path / "bv.npz")["params/pos_embedding"].shape == (1, 9, 8)
    assert np.load(tmp_path / "vt.npz")["Transformer/posembed_input/pos_embedding"].shape == (
        1,
        10,
        8,
    )
    for path in ("bv.npz", "vt.npz"):
        np.testing.assert_allclose(
            run(vit_jax.load(tmp_path / path), images).logits, expected, atol=1e-5
        )


def test_a_hybrid_has_no_place_in_big_vision_nor_a_resnet_in_the_official_code(
    shared_data, tmp_path
):
    for name, to in (("vt_hybrid_tiny", "big_vision"), ("bv_bit_tiny", "official")):
        with pytest.raises(CheckpointError, match="is not written"):
            loading.convert(shared_data / "oracle" / f"{name}.ckpt.npz", tmp_path / "out.npz", to)
    with pytest.raises(
        ConfigError, match="unknown checkpoint format 'offical'; did you mean 'official'"
    ):
        loading.convert("anything", tmp_path / "out.npz", "offical")
    assert not list(tmp_path.iterdir())


def test_the_command_converts_and_says_what_is_wrong(command, file, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    how = ("--to=orbax", "--model=activation=gelu", "--json")
    code, out, _ = command("convert", file, "run", *how)
    assert code == 0 and '"activation": "gelu"' in out.splitlines()[-1]
    assert vit_jax.load_run(tmp_path / "run").model_config.activation == "gelu"
    code, _, err = command("convert", tmp_path / "run", tmp_path / "out.npz", "--to=official")
    assert code == 1 and "activation = 'gelu_tanh'" in err and "Traceback" not in err
    assert command("convert", file, "--to=orbax")[0] == 2


def digits(file, **options):
    config = load_config("configs/digits.py")
    told = {
        "model.name": "ViT-mu/2",
        "model.width": 8,
        "model.depth": 2,
        "model.heads": 2,
        "model.mlp_dim": 12,
    }
    told |= {
        "data.image_size": 8,
        "init_from": str(file),
        "duration": "1 step",
        "batch_size": 8,
        "optim.lr": 0.0,
    }
    config.update_from_flattened_dict(
        {"compilation_cache": str(file.parent), "log.tensorboard": False} | told | options
    )
    return config


def test_a_run_takes_from_its_checkpoint_what_its_config_leaves_open(file, tmp_path):
    config = digits(file, **{"model.name": "", "model.pool": "token"})
    config.model.update({name: None for name in ("width", "depth", "heads", "mlp_dim", "patch")})
    taken = resolving.resolve_from_checkpoint(config, tmp_path)
    assert (taken.model.width, taken.model.patch, taken.model.activation) == (8, 2, "gelu_tanh")
    assert config.model.activation is None and taken.model.name.startswith("ViT-")
    # What was said stays, to be refused if it does not fit.
    said = resolving.resolve_from_checkpoint(
        digits(file, **{"model.activation": "gelu", "model.pool": "map"}), tmp_path
    )
    assert (said.model.activation, said.model.pool) == ("gelu", "map")


@pytest.mark.slow
def test_a_run_starts_from_a_published_file_and_goes_on_without_it(arrays, tmp_path):
    path = tmp_path / "vit.npz"
    np.savez(path, **arrays)
    config = digits(path, **{"model.pool": "token"})
    vit_jax.train(config, tmp_path / "run")
    params = reading.read_weights(tmp_path / "run").params
    description = reading.newest_description(tmp_path / "run")
    np.testing.assert_array_equal(params["embedding"]["kernel"], arrays["embedding/kernel"])
    assert (
        params["position"].shape == (1, 17, 8)
        and description["config"]["model"]["activation"] == "gelu_tanh"
    )
    path.unlink()
    taken = resolving.resolve_from_checkpoint(digits(path), tmp_path / "run").model
    assert (taken.activation, taken.position_of_class) == ("gelu_tanh", True)


def test_conventions_that_were_said_and_contradict_the_checkpoint_are_an_error(file):
    config = registry.model_config(
        "ViT-mu/2", image_size=6, width=8, depth=2, heads=2, mlp_dim=12, activation="gelu"
    )
    like = registry.abstract_weights(config)[1]
    with pytest.raises(ConfigError, match="config.init_from: .* 'gelu_tanh' in the checkpoint"):
        loading.fit_weights(
            formats.read_checkpoint(file, hints=vars(config)), like, config, reset=("head/.*",)
        )
