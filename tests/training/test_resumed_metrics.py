"""A run that was killed and resumed logs what one that was not logs."""

import json
import os
import pathlib
import shutil
import signal

import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.checkpoints import reading
from vit_jax.training.upkeep.preemption import Interrupted

# Of this run's time, not of what it learned.
_TIMED = {
    "images_per_second", "step_seconds", "input_wait", "read_wait", "model_flops_per_second", "core_hours",
    "eta_minutes", "goodput", "mfu",
}  # fmt: skip


def rows(workdir: pathlib.Path) -> dict[int, dict]:
    """The last metrics of every logged step, without the timed ones."""
    found: dict[int, dict] = {}
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        row = {n: v for n, v in json.loads(line).items() if n not in _TIMED}
        found.setdefault(row["step"], {}).update(row)
    return found


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, compilation_cache):
    """The workdir of a whole run, and its config."""
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY
        | {"compilation_cache": compilation_cache, "log.tensorboard": False}
        | {"log.every": "5 steps", "checkpoint.every": "4 steps", "checkpoint.keep": 9}
        | {"eval.every": "3 steps", "checkpoint.best": True, "augment.mixup": 0.2}
    )
    workdir = tmp_path_factory.mktemp("uninterrupted")
    vit_jax.train(config, workdir)
    return workdir, config


@pytest.mark.parametrize("killed_after", [pytest.param(4, marks=pytest.mark.slow), 8])
def test_metrics_of_a_resumed_run_are_those_of_one_that_was_not_interrupted(
    uninterrupted, killed_after, tmp_path
):
    whole = rows(uninterrupted[0])
    killed = shutil.copytree(uninterrupted[0], tmp_path / "killed")
    for folder in (killed / "checkpoints").iterdir():
        if folder.name.isdigit() and int(folder.name) > killed_after:
            shutil.rmtree(folder)
    lines = (killed / "metrics.jsonl").read_text().splitlines(keepends=True)
    before = [line for line in lines if json.loads(line)["step"] <= killed_after]
    (killed / "metrics.jsonl").write_text("".join(before))
    vit_jax.train(uninterrupted[1], killed)
    assert rows(killed) == whole and {1, 5, 10, 12} <= set(whole)


@pytest.mark.slow
@pytest.mark.parametrize("stopped_after", range(1, 12))
def test_a_run_that_is_stopped_after_any_step_concludes_what_one_that_is_not_does(
    uninterrupted, stopped_after, tmp_path
):
    workdir, config = uninterrupted
    config = config.copy_and_resolve_references()
    config.log.every = "1 steps"

    def stop(step: int, metrics: dict) -> None:
        if step == stopped_after:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        vit_jax.train(config, tmp_path, callbacks=[stop])
    result = vit_jax.train(config, tmp_path)
    expected = json.loads((workdir / "result.json").read_text())
    assert result["best"] == expected["best"] and result["loss"] == expected["loss"]

    def evaluations(folder: pathlib.Path) -> dict[int, float]:
        return {step: row["eval/loss"] for step, row in rows(folder).items() if "eval/loss" in row}

    assert evaluations(tmp_path) == evaluations(workdir)
    best = reading.find_checkpoint(tmp_path / "best")
    assert best.name == str(expected["best"]["step"])
