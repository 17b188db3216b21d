"""A run of several processes under the supervisor, killed again and again: the bits are the same."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from tests.integration.conftest import TINY

ROOT = pathlib.Path(__file__).resolve().parents[2]
EVALUATE, SAVE = 10, 5  # Every so many steps.


class Soaked:
    """A supervised run, where it is, and a way to kill its processes."""

    def __init__(self, workdir: pathlib.Path, compilation_cache: str, processes: int, steps: int):
        self.workdir, self._metrics = workdir, workdir / "metrics.jsonl"
        self._seen = 0  # Of the metrics, before the last kill.
        self._output = workdir.with_suffix(".txt")
        overrides = TINY | {
            "duration": f"{steps} steps",
            "log.every": "1 steps",
            "eval.every": f"{EVALUATE} steps",
            "checkpoint.every": f"{SAVE} steps",
            "compilation_cache": compilation_cache,
            "log.tensorboard": False,
        }
        with self._output.open("wb") as output:  # A pipe that nobody reads would fill up.
            self.supervisor = subprocess.Popen(
                [sys.executable, ROOT / "launch/local.py", f"--processes={processes}",
                 "--devices_per_process=1", "--backoff=0.1", "--grace=5", "--max_restarts=10", "--",
                 "train", "--config=configs/digits.py", f"--workdir={workdir}",
                 *(f"--config.{name}={value}" for name, value in overrides.items())],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self, process: int, moment: str, chance: random.Random) -> str:
        """Kills a process at a moment of the attempt under way, waits for the next attempt, and
        tells where it was.
        """
        attempt = len(list(self.workdir.glob("logs/attempt-*"))) or 1
        self._wait(lambda: self._pid(process))
        if moment == "starting":
            time.sleep(chance.uniform(0, 3))
        else:
            steps = chance.randint(1, SAVE)
            self._wait(lambda: getattr(self, f"_{moment}")(steps))
        lines = self._new_lines()
        where = f"{moment} after step {lines[-1]['step'] if lines else 'none'} of attempt {attempt}"
        os.kill(self._pid(process), signal.SIGKILL)
        self._wait(lambda: (self.workdir / f"logs/attempt-{attempt + 1}").exists())
        self._seen = self._metrics.stat().st_size if self._metrics.exists() else 0
        return f"process {process}, {where}"

    def finish(self) -> str:
        code = self.supervisor.wait(timeout=1200)
        assert code == 0, self.output()[-5000:]
        return self.output()

    def output(self) -> str:
        return self._output.read_text()

    def _training(self, steps: int) -> bool:
        lines = self._new_lines()
        return len(lines) >= steps and "loss" in lines[-1] and lines[-1]["step"] % SAVE > 0

    def _evaluation(self, _) -> bool:
        lines = self._new_lines()
        return bool(lines) and "loss" in lines[-1] and lines[-1]["step"] % EVALUATE == 0

    def _saving(self, _) -> bool:
        folder = self.workdir / "checkpoints"
        return bool(self._new_lines()) and any("tmp" in path.name for path in folder.glob("*"))

    def _new_lines(self) -> list[dict]:
        """Of the metrics, since the last kill."""
        if not self._metrics.exists():
            return []
        with self._metrics.open("rb") as file:
            file.seek(self._seen)
            return [json.loads(line) for line in file.read().splitlines(True) if line[-1:] == b"\n"]

    def _pid(self, process: int) -> int | None:
        """Of one of the supervisor's children."""
        mark = f"JAX_PROCESS_ID={process}".encode()
        task = pathlib.Path(f"/proc/{self.supervisor.pid}/task/{self.supervisor.pid}/children")
        for pid in task.read_text().split():
            if mark in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return int(pid)
        return None

    def _wait(self, condition, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.supervisor.poll() is None, self.output()[-5000:]
            assert time.monotonic() < deadline
            time.sleep(0.002)


def final_state(workdir: pathlib.Path) -> dict[str, np.ndarray]:
    """All arrays of the last checkpoint: parameters, their average, the optimizer's, counters."""
    newest = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name))
    handler = ocp.PyTreeCheckpointHandler()
    whole = jax.tree.map(
        lambda _: ocp.RestoreArgs(restore_type=np.ndarray), handler.metadata(newest / "state").tree
    )
    with ocp.Checkpointer(handler) as checkpointer:
        args = ocp.args.PyTreeRestore(restore_args=whole)
        tree = checkpointer.restore(newest / "state", args=args)
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


def assert_same_bits(whole: pathlib.Path, killed: pathlib.Path) -> None:
    """That the last checkpoints of two runs are the same."""
    expected, got = final_state(whole), final_state(killed)
    assert expected.keys() == got.keys() and len(expected) > 30
    for name in expected:
        np.testing.assert_array_equal(expected[name], got[name], err_msg=name)


def soak(folder: pathlib.Path, cache: str, processes: int, steps: int, moments: list[str]) -> None:
    """Trains once undisturbed and once with a kill at each of the moments; compares."""
    Soaked(folder / "whole", cache, processes, steps).finish()
    chance = random.Random(0)
    # Each process in turn, so that none is spared, in an order by chance.
    victims = [number % processes for number in range(len(moments))]
    chance.shuffle(victims)
    run = Soaked(folder / "killed", cache, processes, steps)
    try:
        for number, (victim, moment) in enumerate(zip(victims, moments, strict=True), 1):
            print(f"kill {number}: {run.kill(victim, moment, chance)}", flush=True)
        output = run.finish()
    finally:
        run.supervisor.kill()
        run.supervisor.wait()
    assert output.count("was ended by SIGKILL") >= len(moments)
    assert_same_bits(folder / "whole", folder / "killed")


@pytest.mark.slow
def test_two_processes_killed_in_a_save_end_with_the_bits_of_the_undisturbed_run(
    tmp_path, compilation_cache
):
    soak(tmp_path, compilation_cache, processes=2, steps=12, moments=["saving"])


@pytest.mark.slow
def test_four_processes_killed_24_times_end_with_the_bits_of_the_undisturbed_run(
    tmp_path, compilation_cache
):
    moments = ["training"] * 8 + ["saving"] * 7 + ["evaluation"] * 5 + ["starting"] * 4
    random.Random(1).shuffle(moments)
    soak(tmp_path, compilation_cache, processes=4, steps=200, moments=moments)
