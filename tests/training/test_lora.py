"""Runs that train adapters: what they keep, how they go on, and what is made of them."""

import json
import pathlib
import shutil

import jax
import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import TINY
from tests.integration.test_reliability import all_bits
from tests.models.conftest import parameters
from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import descriptions, reading
from vit_jax.interchange import formats, summary
from vit_jax.models import registry
from vit_jax.training.assembly import assemble, resolve


@pytest.fixture(scope="module")
def make(compilation_cache):
    def config(**overrides):
        found = vit_jax.load_config("configs/digits.py")
        found.update_from_flattened_dict(
            TINY | {"compilation_cache": compilation_cache, "log.tensorboard": False, "optim.ema": 0.0,
                    "optim.warmup": "0 steps",
                    # So large that Orbax's own files, of which it writes more at times, are small beside it.
                    "model.width": 64, "model.mlp_dim": 256}
        )  # fmt: skip
        found.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in overrides.items()}
        )
        return found

    return config


@pytest.fixture(scope="module")
def base(make, tmp_path_factory):
    folder = tmp_path_factory.mktemp("base") / "model"
    config = assemble(resolve(make()), num_classes=10, examples_per_epoch=1000).model_config
    model = formats.LoadedCheckpoint(config, parameters(config))
    formats.write_checkpoint(model, folder, "orbax")
    return folder


@pytest.fixture(scope="module")
def adapted(make, base, tmp_path_factory):
    """A run of 12 steps with adapters, and its last metrics."""
    workdir = tmp_path_factory.mktemp("adapted")
    return workdir, vit_jax.train(make(init_from=str(base), lora__lora_rank=2), workdir)


def arrays(path) -> dict[str, np.ndarray]:
    return {
        n: np.asarray(x) for n, x in patterns.named(formats.read_checkpoint(path).params).items()
    }


def test_only_adapters_and_the_head_have_gradients_and_optimizer_state(make, base):
    config = resolve(make(init_from=str(base), lora__lora_rank=2, optim__ema=0.9))
    assembly = assemble(config, num_classes=10, examples_per_epoch=1000)
    state = jax.eval_shape(assembly.init, jax.random.key(0))
    trained = {"adapters", "head"}
    assert state.params.keys() == state.ema.keys() == trained
    names = " ".join(patterns.names(state.opt_state))
    assert "lora_a" in names and "qkv" not in names and "embedding" not in names
    assert "qkv" in " ".join(patterns.names(state.base)) and "head" not in state.base
    assert not any("qkv" in name for name in patterns.names(state.parts()))


@pytest.mark.slow
def test_training_changes_the_adapted_kernels_and_the_head_alone(base, adapted):
    before, after = arrays(base), arrays(adapted[0])
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"encoder/layers/attention/qkv/kernel", "head/kernel", "head/bias"}
    key = 1
    np.testing.assert_array_equal(
        before["encoder/layers/attention/qkv/kernel"][:, :, key],
        after["encoder/layers/attention/qkv/kernel"][:, :, key],
    )


def test_a_checkpoint_holds_the_adapters_and_says_where_the_base_is(base, adapted):
    folder = reading.find_checkpoint(adapted[0])
    described = reading.read_description(folder)
    assert described["base"]["path"] == str(base) and described["base"]["digest"].startswith("2:")
    files = sum(file.stat().st_size for file in pathlib.Path(folder).rglob("*") if file.is_file())
    whole = sum(x.nbytes for x in arrays(base).values())
    assert files < whole  # though it has two moments and all else of the state


def test_show_describes_the_adapters_of_a_run_and_of_no_other(base, adapted):
    assert "adapters      rank 2, of .*/query, .*/value" in summary.text(
        summary.summarize(adapted[0])
    )
    assert "adapters" not in summary.text(summary.summarize(base))


def test_what_is_loaded_is_the_base_with_its_adapters(adapted, command, tmp_path):
    workdir, result = adapted
    code, out, err = command("evaluate", f"--checkpoint={workdir}", "--json")
    assert code == 0, err
    evaluated = json.loads(out.splitlines()[-1])
    assert evaluated["accuracy"] == pytest.approx(result["accuracy"])
    assert evaluated["loss"] == pytest.approx(result["loss"], abs=1e-5)
    code, out, err = command("convert", workdir, tmp_path / "merged.safetensors", "--to=timm",
                             "--model=activation=gelu")  # fmt: skip
    assert code == 0, err
    run = vit_jax.load_run(workdir)
    assert run.step == 12 and run.directory == reading.find_checkpoint(workdir)
    merged, ours = arrays(tmp_path / "merged.safetensors"), registry_arrays(run)
    for name, array in merged.items():
        np.testing.assert_allclose(ours[name], array, atol=1e-5)
    assert command("show", workdir)[0] == 0


def registry_arrays(run) -> dict[str, np.ndarray]:
    return patterns.named(jax.device_get(registry.split(run.model)[1].params))


def test_a_resumed_run_gives_the_same_bits(make, base, adapted, tmp_path):
    config = make(init_from=str(base), lora__lora_rank=2)
    shutil.copytree(adapted[0], tmp_path / "run")
    for step in ("8", "12"):
        shutil.rmtree(tmp_path / "run/checkpoints" / step)
    vit_jax.train(config, tmp_path / "run")
    expected = arrays(adapted[0])
    for name, array in arrays(tmp_path / "run").items():
        np.testing.assert_array_equal(array, expected[name])


@pytest.mark.slow
def test_on_another_mesh_the_results_are_the_same(make, base, adapted, tmp_path):
    config = make(
        init_from=str(base), lora__lora_rank=2, mesh__fsdp=2, mesh__tensor=2, mesh__fsdp_min_size=1
    )
    result = vit_jax.train(config, tmp_path)
    assert result["loss"] == pytest.approx(adapted[1]["loss"], abs=1e-5)
    expected = arrays(adapted[0])
    for name, array in arrays(tmp_path).items():
        np.testing.assert_allclose(array, expected[name], atol=1e-5)


def test_another_base_is_refused(make, base, adapted, tmp_path):
    moved = tmp_path / "base"
    shutil.copytree(base, moved)
    config = make(init_from=str(moved), lora__lora_rank=2, duration="4 steps")
    vit_jax.train(config, tmp_path / "run")
    shutil.rmtree(moved)
    with pytest.raises(CheckpointError, match="base .* cannot be used"):
        vit_jax.load_run(tmp_path / "run")
    model = formats.read_checkpoint(base)
    model.params = jax.tree.map(lambda x: np.asarray(x) + np.float32(0.01), model.params)
    formats.write_checkpoint(model, moved, "orbax")
    with pytest.raises(CheckpointError, match="fingerprint"):
        vit_jax.load_run(tmp_path / "run")
    config.duration = "8 steps"
    config.checkpoint.on_config_change = "allow"
    with pytest.raises(ConfigError, match="other weights than the base"):
        vit_jax.train(config, tmp_path / "run")


@pytest.mark.parametrize(
    "overrides, message",
    [
        ({"init_from": ""}, "config.init_from"),
        ({"lora__lora_targets": (".*/querry",)}, "config.lora.lora_targets"),
    ],
)
def test_adapters_of_nothing_are_refused(make, base, overrides, message):
    config = make(**{"init_from": str(base), "lora__lora_rank": 2} | overrides)
    with pytest.raises(ConfigError, match=message):
        assemble(resolve(config), num_classes=10, examples_per_epoch=1000)


@pytest.mark.slow
def test_dino_trains_adapters_and_so_does_its_teacher(compilation_cache, tmp_path):
    """Its own heads too; what is evaluated and loaded is the base with the teacher's adapters."""

    def config(**fields):
        found = vit_jax.load_config("configs/dino.py:smoke")
        found.update_from_flattened_dict(TINY | {
            "compilation_cache": compilation_cache, "log.tensorboard": False, "eval.every": "0 steps",
            "objective.prototypes": 16, "objective.head_hidden": 16, "checkpoint.every": "0 steps", **fields,
        })  # fmt: skip
        return found

    vit_jax.train(config(duration="2 steps"), tmp_path / "base")
    adapted = {"init_from": str(tmp_path / "base"), "init_reset": (), "lora.lora_rank": 2}
    result = vit_jax.train(config(**adapted, **{"optim.lr": 0.01}), tmp_path / "run")
    assert np.isfinite(result["knn/accuracy"])
    before, after = arrays(tmp_path / "base"), arrays(tmp_path / "run")
    changed = {name for name in before if not np.array_equal(before[name], after[name])}
    assert changed == {"encoder/layers/attention/qkv/kernel"}
    state, b = all_bits(tmp_path / "run"), "adapters/encoder/layers/attention/query/lora_b"
    assert 0 < np.abs(state[f"teacher/{b}"]).max() < np.abs(state[f"params/{b}"]).max()
    assert not any("kernel" in name for name in state if name.startswith(("teacher/", "params/")))


def test_a_run_that_stored_its_section_by_an_earlier_name_is_read_and_resumes(
    make, base, adapted, tmp_path
):
    workdir = tmp_path / "old"
    shutil.copytree(adapted[0], workdir)
    for file in workdir.glob("checkpoints/*/description/metadata"):
        description = json.loads(file.read_text())
        del description["sha256"]
        description["config"]["adapt"] = description["config"].pop("lora")
        file.write_text(json.dumps(descriptions.sealed(description)))
    now = arrays(adapted[0])
    assert all(np.array_equal(array, now[name]) for name, array in arrays(workdir).items())
    again = vit_jax.train(make(init_from=str(base), lora__lora_rank=2), workdir)
    assert again["loss"] == adapted[1]["loss"]
