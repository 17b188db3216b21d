"""A run in a bucket under the supervisor, its processes killed again and again, also in saves: it ends
with the bits of a run in a folder that nobody disturbed.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from etils import epath

from tests.integration.conftest import TINY
from tests.launch.test_soak import final_state
from vit_jax.checkpoints.reading import saved_steps

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEVICES = 4


class Supervised:
    """A run under `launch/local.py`, on four simulated devices in all."""

    def __init__(self, workdir: str, logs: pathlib.Path, cache: str, processes: int, steps: int):
        overrides = TINY | {
            "duration": f"{steps} steps",
            "log.every": "1 steps",
            "eval.every": f"{steps} steps",
            "checkpoint.every": "3 steps",
            "compilation_cache": cache,
            "log.tensorboard": False,
        }
        self._logs, self._output = logs, logs.with_suffix(".txt")
        with self._output.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, ROOT / "launch/local.py", f"--processes={processes}",
                 f"--devices_per_process={DEVICES // processes}", "--backoff=0.1", "--grace=5",
                 "--max_restarts=10", f"--log_dir={logs}", "--", "train",
                 "--config=configs/digits.py", f"--workdir={workdir}",
                 *(f"--config.{name}={value}" for name, value in overrides.items())],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip

    def kill(self, chance: random.Random, faults, in_a_save: bool) -> None:
        """Kills one of the processes while it saves, or some time after the attempt began."""
        faults.forget_requests()
        self.until(lambda: _asked(faults, "GET", ".lock"))
        if in_a_save:
            self.until(lambda: _asked(faults, "POST", "ocdbt"))
        time.sleep(chance.uniform(0, 0.5 if in_a_save else 3))
        attempt = len(self.attempts())
        if children := self._children():
            os.kill(chance.choice(children), signal.SIGKILL)
            self.until(lambda: len(self.attempts()) > attempt)

    def attempts(self) -> list[pathlib.Path]:
        return list(self._logs.glob("attempt-*"))

    def until(self, condition, seconds: float = 600) -> None:
        deadline = time.monotonic() + seconds
        while not condition() and self.process.poll() is None:
            assert time.monotonic() < deadline, self.output()[-5000:]
            time.sleep(0.02)

    def finish(self, code: int = 0) -> None:
        assert self.process.wait(1200) == code, self.output()[-5000:]

    def output(self) -> str:
        return self._output.read_text()

    def _children(self) -> list[int]:
        """The processes of the run."""
        found = pathlib.Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        return [
            int(pid)
            for pid in found.read_text().split()
            if b"train" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        ]


def _asked(faults, method: str, text: str) -> bool:
    return any(m == method and text in path for m, path in faults.requests())


def soak(folder, cache, cloud_storage, kills: int, processes: tuple[int, ...], steps: int) -> None:
    """Trains with kills, first by so many processes, then by so many, and compares."""
    chance, faults = random.Random(0), cloud_storage.faults
    workdir = f"{cloud_storage.new_bucket()}/runs/killed"
    Supervised(str(folder / "whole"), folder / "whole-logs", cache, processes[0], steps).finish()
    done = 0
    faults.latency(20)
    try:
        for part, number in enumerate(processes, 1):
            run = Supervised(workdir, folder / f"logs-{part}", cache, number, steps)
            try:
                while done < kills * part // len(processes) and run.process.poll() is None:
                    run.kill(chance, faults, in_a_save=done % 2 == 0)
                    done += 1
                if part < len(processes):
                    run.until(lambda: _asked(faults, "POST", "commit_success"))
                    run.process.terminate()
                run.finish(42 if part < len(processes) else 0)
            finally:
                run.process.kill()
                run.process.wait()
    finally:
        faults.clear()
    assert done == kills
    expected, got = final_state(folder / "whole"), final_state(epath.Path(workdir))
    assert expected.keys() == got.keys() and len(expected) > 30
    for name in expected:
        np.testing.assert_array_equal(expected[name], got[name], err_msg=name)


@pytest.mark.slow
def test_a_run_in_a_bucket_killed_twice_ends_with_the_same_bits(
    tmp_path, compilation_cache, cloud_storage
):
    soak(tmp_path, compilation_cache, cloud_storage, kills=2, processes=(1,), steps=12)


@pytest.mark.slow
def test_four_then_two_then_four_processes_killed_20_times_end_with_the_same_bits(
    tmp_path, compilation_cache, cloud_storage
):
    soak(tmp_path, compilation_cache, cloud_storage, kills=20, processes=(4, 2, 4), steps=60)


@pytest.mark.slow
def test_after_each_of_20_kills_metrics_go_up_to_the_newest_checkpoint(
    tmp_path, compilation_cache, cloud_storage
):
    workdir = f"{cloud_storage.new_bucket()}/runs/killed"
    overrides = TINY | {
        "duration": "100000 steps",
        "log.every": "1 steps",
        "checkpoint.every": "10 steps",
        "compilation_cache": compilation_cache,
        "log.tensorboard": False,
    }
    chance, steps = random.Random(0), [0]
    for attempt in range(20):
        with (tmp_path / f"{attempt}.txt").open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "vit_jax", "train", "--config=configs/digits.py",
                 f"--workdir={workdir}", *(f"--config.{n}={v}" for n, v in overrides.items())],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT,
            )  # fmt: skip
        deadline = time.monotonic() + 300
        while newest_step(workdir) < steps[-1] + 10 * chance.randint(1, 3):
            assert process.poll() is None, (tmp_path / f"{attempt}.txt").read_text()[-3000:]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(chance.uniform(0, 0.5))
        process.send_signal(signal.SIGKILL)
        process.wait()
        steps.append(newest_step(workdir))
        lines = (epath.Path(workdir) / "metrics.jsonl").read_text().splitlines()
        logged = {json.loads(line)["step"] for line in lines if line.endswith("}")}
        assert logged >= set(range(1, steps[-1] + 1)), steps
    assert len(set(steps)) == 21


def newest_step(workdir: str) -> int:
    return max(saved_steps(epath.Path(workdir) / "checkpoints"), default=0)
