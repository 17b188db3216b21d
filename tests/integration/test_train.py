"""Whole runs on real digits, in this process: eight simulated devices, data parallel."""

import json
import shutil
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from etils import epath

import vit_jax
from tests.repeats import slow_unless
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading, tiers
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.training import step_programs
from vit_jax.training.actions.profile import Profile
from vit_jax.training.guards import changed_fields
from vit_jax.training.upkeep.device_checks import DeviceChecks
from vit_jax.training.upkeep.health import NonFiniteError


def params_of(workdir):
    return reading.read_weights(workdir).params


def parts_of(workdir, *names):
    folder = reading.find_checkpoint(workdir)
    return reading.read_parts(folder, reading.abstract_parts(folder, names))


def assert_same_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(x, y)


def test_training_returns_and_writes_its_metrics(finished_run):
    workdir, result, _ = finished_run
    assert result["step"] == 12 and result["examples"] == 359 and 0 <= result["accuracy"] <= 1
    assert json.loads((workdir / "result.json").read_text()) == result
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 12]
    for name in (
        "loss", "accuracy", "learning_rate", "gradient_norm", "update_norm", "parameter_norm",
        "images_per_second", "step_seconds", "input_wait", "read_wait", "model_flops_per_second", "examples",
        "epochs", "core_hours",
    ):  # fmt: skip
        assert np.isfinite(lines[0][name]), name
    assert lines[3]["examples"] == 12 * 32 and lines[-1]["eval/accuracy"] == result["accuracy"]
    assert list((workdir / "tensorboard").glob("events*"))


def test_a_checkpoint_directory_explains_itself(finished_run):
    workdir, _, config = finished_run
    for path in (workdir, workdir / "checkpoints", workdir / "checkpoints" / "12"):
        run = vit_jax.load_run(path)
        assert run.step == 12 and run.classes == tuple(map(str, range(10)))
        assert run.config.to_dict() == config.to_dict()
    description = reading.read_description(run.directory)
    assert description["model"]["width"] == 32 and description["versions"]["jax"] == jax.__version__
    assert description["training_data"] == sources.open_train(Data()).fingerprint()
    assert run.model(np.zeros((2, 32, 32, 3), np.float32)).logits.shape == (2, 10)


def test_only_the_last_checkpoints_and_the_chosen_ones_are_kept(tiny_config, tmp_path, monkeypatch):
    config = tiny_config(
        duration="10 steps",
        checkpoint__every="2 steps",
        checkpoint__keep=2,
        checkpoint__keep_every=4,
        optim__ema=0.0,
    )
    monkeypatch.chdir(tmp_path)  # and a relative workdir is as good as any
    vit_jax.train(config, "run")
    assert_same_bits(params_of("run"), parts_of("run", "params")["params"])  # there is no average
    kept = sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [4, 8, 10]


def test_a_finished_run_started_again_changes_nothing(finished_run, tmp_path):
    finished, result, config = finished_run
    workdir = shutil.copytree(finished, tmp_path / "run")
    before = params_of(workdir)
    again = vit_jax.train(config, workdir)
    assert again["accuracy"] == pytest.approx(result["accuracy"]) and again["step"] == 12
    assert_same_bits(before, params_of(workdir))


def test_resuming_with_another_recipe_is_refused_by_field(finished_run, tiny_config):
    workdir, _, config = finished_run
    other = config.copy_and_resolve_references()
    other.optim.lr, other.data.pad = 0.5, 1
    with pytest.raises(
        ConfigError, match=r"config\.data\.pad: 4 -> 1; config\.optim\.lr: 0\.003 -> 0\.5"
    ):
        vit_jax.train(other, workdir)


def test_what_does_not_change_the_result_may_change(finished_run):
    _, _, config = finished_run
    other = config.copy_and_resolve_references()
    other.log.every, other.data.threads, other.mesh.fsdp, other.model.unroll = "7 steps", 1, 8, 1
    model = {"name": config.model.name, "image_size": config.data.image_size}
    parts = {"model": model, "classes": [], "training_examples": 3}
    saved = {"config": config.to_dict(), **parts}
    assert changed_fields(saved, saved | {"config": other.to_dict()}) == []
    assert changed_fields(saved, saved | {"classes": ["a"]}) == ["classes: [] -> ['a']"]


# Files that are short or absent are those of `checkpoints/test_damage.py` too.
@pytest.mark.parametrize("damage", slow_unless(["flip"], ["truncate", "flip", "remove"]))
def test_a_damaged_newest_checkpoint_falls_back_to_the_one_before(
    finished_run, tmp_path, damage, caplog
):
    config = finished_run[2]
    shutil.copytree(finished_run[0], tmp_path, dirs_exist_ok=True)
    expected = params_of(tmp_path)
    spoil(tmp_path / "checkpoints" / "12", damage)
    with caplog.at_level("WARNING", logger="absl"):
        vit_jax.train(config, tmp_path)
    assert (
        "checkpoint of step 12 is damaged" in caplog.text and "going back to step 8" in caplog.text
    )
    assert_same_bits(expected, params_of(tmp_path))
    assert len(list((tmp_path / "damaged_checkpoints").iterdir())) == 1


@pytest.fixture(scope="module")
def with_local_states(tiny_config, tmp_path_factory):
    """A run that was killed before it deleted its local states of steps 3 and 6: (its folder, a copy, config)."""
    folder = tmp_path_factory.mktemp("with_local_states") / "folder"
    config = tiny_config(
        duration="8 steps",
        checkpoint__local=str(folder / "local"),
        checkpoint__local_every="3 steps",
        eval__evaluators=(),
    )
    with pytest.MonkeyPatch.context() as killed:
        killed.setattr(tiers.LocalTier, "discard", tiers.LocalTier.close)
        vit_jax.train(config, folder / "run")
    return folder, shutil.copytree(folder, folder.with_name("copy")), config


@pytest.mark.parametrize("damaged, local", [(("8",), 6), (("4", "8"), 3)])
def test_a_local_state_is_used_that_is_newer_than_the_good_checkpoints(
    with_local_states, caplog, damaged, local
):
    """Newer than the one before the damaged ones, or the only good one that is left."""
    folder, copy, config = with_local_states  # local states know their workdir by its path
    shutil.rmtree(folder)
    shutil.copytree(copy, folder)
    expected = params_of(folder / "run")
    for file in folder.glob("local/*/*.[36]"):
        if not file.name.endswith(f".{local}"):
            file.unlink()
    for step in damaged:
        spoil(folder / "run" / "checkpoints" / step, "flip")
    with caplog.at_level("INFO", logger="absl"):
        vit_jax.train(config, folder / "run")
    assert f"resumed at step {local} of 8" in caplog.text
    for step in damaged:
        assert f"checkpoint of step {step} is damaged" in caplog.text
    assert caplog.text.count(f"going back to step {local}, moved it to") == len(damaged)
    assert_same_bits(expected, params_of(folder / "run"))
    steps = reading.saved_steps(epath.Path(folder) / "run" / "checkpoints")
    assert steps[-1] == 8


def test_when_no_checkpoint_is_good_nothing_is_overwritten(finished_run, tmp_path):
    config = finished_run[2]
    shutil.copytree(finished_run[0], tmp_path, dirs_exist_ok=True)
    for step in ("4", "8", "12"):
        spoil(tmp_path / "checkpoints" / step, "truncate")
    before = sorted(str(p) for p in tmp_path.rglob("*"))
    with pytest.raises(
        reading.CheckpointError, match="no checkpoint .* can be read; nothing was changed"
    ):
        vit_jax.train(config, tmp_path)
    assert [p for p in before if "checkpoints" in p] == [
        p for p in sorted(map(str, tmp_path.rglob("*"))) if "checkpoints" in p
    ]


def spoil(folder, how):
    """Damages the files that hold the arrays of a checkpoint; all of them, since parts of some may
    be in no use.
    """
    files = [p for p in folder.glob("state/**/d/*") if p.is_file()]
    assert files
    for file in files:
        content = bytearray(file.read_bytes())
        if how == "truncate":
            file.write_bytes(content[: len(content) // 2])
        elif how == "remove":
            file.unlink()
        elif len(content) > 20_000:  # the arrays themselves, whose bits no file format guards
            for at in range(1, 16):
                content[at * len(content) // 16] ^= 1
            file.write_bytes(content)


def test_fine_tuning_takes_over_everything_but_the_head(finished_run, tiny_config, tmp_path):
    workdir, _, _ = finished_run
    config = tiny_config(
        init_from=str(workdir),
        duration="1 step",
        data__image_size=48,
        optim__lr=0.0,
        eval__evaluators=(),
    )
    vit_jax.train(config, tmp_path)
    old, new = params_of(workdir), params_of(tmp_path)
    assert not new["head"]["kernel"].any() and old["head"]["kernel"].any()
    np.testing.assert_array_equal(
        new["encoder"]["layers"]["mlp"]["up"]["kernel"],
        old["encoder"]["layers"]["mlp"]["up"]["kernel"],
    )
    # Corner-aligned linear interpolation keeps the corners.
    old_grid, new_grid = old["position"].reshape(4, 4, -1), new["position"].reshape(6, 6, -1)
    np.testing.assert_allclose(new_grid[::5, ::5], old_grid[::3, ::3], rtol=1e-6)


def test_fine_tuning_from_another_size_names_every_tensor_that_does_not_fit(
    finished_run, tiny_config, tmp_path
):
    workdir, _, _ = finished_run
    with pytest.raises(
        ConfigError, match=r"class_token \(1, 1, 32\) is not in the checkpoint"
    ) as raised:
        vit_jax.train(
            tiny_config(init_from=str(workdir), model__pool="token", model__mlp_dim=128), tmp_path
        )
    assert (
        "encoder/layers/mlp/up/kernel is (2, 32, 64) in the checkpoint, (2, 32, 128) in the model"
        in str(raised.value)
    )


OVERFLOW = (1e-40,)  # pixels are divided by it


def test_a_loss_that_is_not_finite_stops_the_run_and_names_step_and_tensors(tiny_config, tmp_path):
    with pytest.raises(
        NonFiniteError,
        match=r"step \d+: loss or gradients are not finite, in the gradients of class|embedding",
    ):
        vit_jax.train(tiny_config(data__std=OVERFLOW), tmp_path)
    assert not (tmp_path / "checkpoints" / "12").exists()


def test_skipping_ends_after_as_many_bad_updates_in_a_row_as_allowed(
    tiny_config, tmp_path, monkeypatch
):
    """Devices are asked once who is at fault, at the end."""
    config = tiny_config(data__std=OVERFLOW, nonfinite="skip", max_skips=3)
    asked, explain = [], DeviceChecks.explain
    monkeypatch.setattr(DeviceChecks, "explain", lambda *a: (asked.append(a), explain(*a))[1])
    with pytest.raises(NonFiniteError, match="updates in a row were skipped"):
        vit_jax.train(config, tmp_path)
    assert len(asked) == 1


def test_an_averaged_model_is_what_is_evaluated_and_loaded(finished_run):
    averaged = reading.read_weights(finished_run[0]).params
    loaded = vit_jax.load_run(finished_run[0])
    np.testing.assert_array_equal(loaded.model.position[...], averaged["position"])
    saved = parts_of(finished_run[0], "params", "ema")
    assert_same_bits(averaged, saved["ema"])
    assert np.abs(saved["params"]["position"] - averaged["position"]).max() > 0


@pytest.mark.slow
def test_a_trace_is_recorded_on_request(tiny_config, tmp_path):
    vit_jax.train(tiny_config(log__profile=(2, 3)), tmp_path)
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))


def test_the_step_is_compiled_once_and_nothing_moves_unasked_between_host_and_devices(
    tiny_config, tmp_path, monkeypatch
):
    compilations, during_step = [], []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: (
            event.endswith("backend_compile_duration") and compilations.append(event)
        )
    )
    compile_train_step = step_programs.compile_train_step

    def watched(*arguments, **options):
        jitted = compile_train_step(*arguments, **options)

        def lower(*arguments):
            program = jitted.lower(*arguments).compile()

            def run(state, batch, seed):
                with pytest.raises(Exception, match="[Dd]isallowed host-to-device"):
                    jax.jit(lambda x: x)(np.ones(3))
                before = len(compilations)
                result = program(state, batch, seed)
                during_step.append(len(compilations) - before)
                return result

            return SimpleNamespace(compile=lambda: run)

        return SimpleNamespace(lower=lower)

    monkeypatch.setattr(step_programs, "compile_train_step", watched)
    vit_jax.train(tiny_config(duration="6 steps", log__every="1 steps"), tmp_path)
    assert during_step == [0] * 6 and compilations


def test_each_of_several_processes_has_a_folder_of_its_own_for_its_profile(tmp_path, monkeypatch):
    for index in (0, 1, 2):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        log = SimpleNamespace(profile=(1, 1))
        config = SimpleNamespace(log=log)
        profile = Profile(SimpleNamespace(config=config, workdir=epath.Path(tmp_path)))
        profile.before_step(SimpleNamespace(step=0))
        metrics = {"loss": jax.numpy.zeros(())}
        profile.after_step(SimpleNamespace(step=1, metrics=metrics))
    folder = tmp_path / "profile"
    names = {path.relative_to(folder).parts[0] for path in folder.rglob("*.xplane.pb")}
    assert names == {"plugins", "process-1", "process-2"}
