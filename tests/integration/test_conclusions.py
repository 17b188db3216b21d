"""A run that is ended or goes back at any of its steps concludes what the unbroken run does: the curve, the best, when
patience ends it, and what a sweep chooses.
"""

import json
import pathlib
import signal

import numpy as np
import pytest

import vit_jax
from tests.integration.test_reliability import bits
from tests.training.flips import Flips
from tests.waiting import PATIENCE
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats, summary

STEPS = range(1, 21)
# Patience ends the run after step 20 of 24: no evaluation after that of step 12 is better. It is at 2 of 4 before.
RUN = {
    "model.depth": 1, "duration": "24 steps", "seed": 2, "optim.lr": 0.003, "optim.warmup": "0 steps",
    "optim.schedule": "constant", "log.every": "1 steps", "eval.every": "2 steps", "eval.best": "accuracy",
    "eval.patience": 4, "checkpoint.every": "3 steps", "checkpoint.best": True, "checkpoint.keep": 1,
}  # fmt: skip
FLAGS = tuple(f"--config.{name}={value}" for name, value in RUN.items())
# Two settings and a final run, of seven steps each.
SWEEP = (
    *FLAGS, "--config.duration=7 steps", "--config.eval.every=3 steps", "--config.data.train_split=train[:90%]",
    "--grid=optim.lr=0.003,0.01", "--seeds=1",
)  # fmt: skip
# Metrics that say how fast the machine is.
_OF_TIME = {
    "images_per_second", "step_seconds", "input_wait", "read_wait", "model_flops_per_second", "core_hours",
    "eta_minutes", "goodput", "seconds",
}  # fmt: skip


def without_times(metrics: dict) -> dict:
    return {name: value for name, value in metrics.items() if name not in _OF_TIME}


def curve(workdir: pathlib.Path) -> dict[tuple[int, str], float]:
    """All metrics of a run by step and name, the times left out. What a step that is repeated has written before is
    replaced by what it writes again.
    """
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {
        (line["step"], name): value for line in lines for name, value in without_times(line).items()
    }


def conclusions(workdir: pathlib.Path) -> dict:
    """What a run that has ended says of itself, in its files and by its names."""
    shown = summary.summarize(workdir)["best"]
    return {
        "curve": curve(workdir),
        "result": without_times(json.loads((workdir / "result.json").read_text())),
        "best.json": json.loads((workdir / "best.json").read_text()),
        "best": formats.read_checkpoint(workdir / "best").run.folder.name,
        "last": formats.read_checkpoint(workdir / "last").run.folder.name,
        "steps": reading.saved_steps(reading.places.locate(workdir) / reading.FOLDER),
        "shown": {name: shown[name] for name in ("metric", "value", "step")},
    }


def assert_same_conclusions(workdir: pathlib.Path, unbroken: pathlib.Path) -> None:
    assert conclusions(workdir) == conclusions(unbroken)
    for name in ("best", "last"):
        expected, got = bits(unbroken / name), bits(workdir / name)
        for array in expected:
            np.testing.assert_array_equal(expected[array], got[array], err_msg=f"{name}: {array}")


def ended_at(step: int, number: int) -> dict:
    """Options of a process that gets this signal before that step."""
    said = {"step": step, "signal": int(number)}
    return {"module": "tests.integration.ended", "env": {"ENDED": json.dumps(said)}}


@pytest.fixture
def train(cli):
    def start(workdir, command="train", flags=FLAGS, code=0, **options):
        process = cli(
            command, "--config=configs/digits.py", f"--workdir={workdir}", *flags, tiny=True, **options
        )  # fmt: skip
        _, err = process.communicate(timeout=PATIENCE)
        assert process.returncode == code, err
        return err

    return start


@pytest.mark.slow
def test_a_run_ended_at_any_step_concludes_what_the_unbroken_one_does(train, tmp_path):
    train(tmp_path / "unbroken")
    assert json.loads((tmp_path / "unbroken" / "result.json").read_text())["step"] == STEPS[-1]
    for number, code in ((signal.SIGTERM, 42), (signal.SIGKILL, -signal.SIGKILL)):
        for step in STEPS:
            workdir = tmp_path / f"{number.name}_{step}"
            train(workdir, code=code, **ended_at(step, number))
            train(workdir)
            assert_same_conclusions(workdir, tmp_path / "unbroken")


@pytest.mark.slow
def test_a_run_that_goes_back_at_any_step_concludes_what_the_unbroken_one_does(
    tiny_config, tmp_path, monkeypatch
):
    fields = {name.replace(".", "__"): value for name, value in RUN.items()}
    config = tiny_config(**fields, audit__every=1)
    vit_jax.train(config, tmp_path / "unbroken")
    for step in STEPS:
        workdir = tmp_path / f"flipped_{step}"
        with monkeypatch.context() as patches:
            flips = Flips([step], seed=step, only="params", after_use=True)
            flips.install(patches.setattr)
            vit_jax.train(config, workdir)
        assert [made for made, _, _ in flips.made] == [step]
        assert_same_conclusions(workdir, tmp_path / "unbroken")


def chosen(workdir: pathlib.Path) -> dict:
    """What a sweep says, without times."""
    said = json.loads((workdir / "sweep.json").read_text())
    return said | {"seeds": [without_times(result) for result in said["seeds"]]}


@pytest.mark.slow
def test_a_sweep_ended_at_any_step_chooses_what_the_unbroken_one_does(train, tmp_path):
    train(tmp_path / "unbroken", "sweep", SWEEP)
    expected = chosen(tmp_path / "unbroken")
    curves = {
        path.parent.relative_to(tmp_path / "unbroken"): curve(path.parent)
        for path in (tmp_path / "unbroken").rglob("metrics.jsonl")
    }
    assert len(curves) == 3
    for step in STEPS:
        number, code = ((signal.SIGTERM, 42), (signal.SIGKILL, -signal.SIGKILL))[step % 2]
        workdir = tmp_path / f"sweep_{step}"
        train(workdir, "sweep", SWEEP, code=code, **ended_at(step, number))
        train(workdir, "sweep", SWEEP)
        assert chosen(workdir) == expected
        for run, unbroken in curves.items():
            assert curve(workdir / run) == unbroken
