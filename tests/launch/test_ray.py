"""`vit_jax launch ray` on a real Ray cluster of this machine, with two workers."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.conftest import QUICK
from tests.integration.conftest import HOSTS
from tests.launch.test_soak import assert_same_bits

ROOT = pathlib.Path(__file__).resolve().parents[2]
STEPS, SAVE = 60, 5
# One device in each process, and the same programs, whatever started it.
DEVICES = {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
}


def train(workdir: pathlib.Path, cache: str, **overrides) -> list[str]:
    """Words of a run so small that it takes seconds."""
    overrides = HOSTS | {
        "duration": f"{STEPS} steps",
        "checkpoint.every": f"{SAVE} steps",
        "compilation_cache": cache,
    } | overrides  # fmt: skip
    return [
        "train", "--config=configs/digits.py", f"--workdir={workdir}",
        *(f"--config.{name}={value}" for name, value in overrides.items()),
    ]  # fmt: skip


class RayRun:
    """`vit_jax launch ray` with two workers, its output in a file."""

    def __init__(self, folder: pathlib.Path, command: list[str], *flags: str):
        self.folder, self._output = folder, folder / "ray.txt"
        # What Ray writes at home, and its usage report, are none of a test's business.
        home = {"HOME": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "RAY_DEDUP_LOGS": "0"}
        with self._output.open("wb") as output:
            self.driver = subprocess.Popen(
                [sys.executable, "-m", "vit_jax", "launch", "ray", "--nodes=2", *flags, "--", *command],
                cwd=ROOT, stdout=output, stderr=subprocess.STDOUT, process_group=0,
                env=os.environ | home | DEVICES,
            )  # fmt: skip

    def output(self) -> str:
        return self._output.read_text()

    def finish(self, seconds: float = 900) -> int:
        return self.driver.wait(timeout=seconds)

    def until(self, condition, seconds: float = 900) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.driver.poll() is None, self.output()[-5000:]
            assert time.monotonic() < deadline, self.output()[-5000:]
            time.sleep(0.02)

    def worker(self, process: int) -> int:
        """The pid of the worker of Ray in which a process of the run is."""
        for entry in pathlib.Path("/proc").iterdir():
            try:
                words = (entry / "environ").read_bytes().split(b"\0")
                if f"JAX_PROCESS_ID={process}".encode() not in words:
                    continue
                if f"HOME={self.folder}".encode() not in words:
                    continue
                stat = (entry / "stat").read_text()
            except (FileNotFoundError, NotADirectoryError, ProcessLookupError, PermissionError):
                continue
            return int(stat.rpartition(")")[2].split()[1])
        raise AssertionError(f"process {process} does not run")

    def end(self) -> None:
        if self.driver.poll() is None:
            os.killpg(self.driver.pid, signal.SIGTERM)
            try:
                self.driver.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(self.driver.pid, signal.SIGKILL)
                self.driver.wait()


@pytest.fixture
def start(tmp_path):
    """`start(command, *flags)`: a `RayRun`, ended with the test."""
    runs = []

    def start_run(command: list[str], *flags: str) -> RayRun:
        runs.append(RayRun(tmp_path, command, *flags))
        return runs[-1]

    yield start_run
    for run in runs:
        run.end()


def newest(workdir: pathlib.Path) -> int:
    """The step of the newest checkpoint; -1 if there is none."""
    names = [path.name for path in (workdir / "checkpoints").glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


@pytest.mark.slow
def test_a_run_whose_worker_is_killed_goes_on_and_ends_with_the_same_bits(
    start, tmp_path, compilation_cache
):
    whole = [sys.executable, "launch/local.py", "--processes=2", "--"]
    whole += train(tmp_path / "whole", compilation_cache)
    environment = os.environ | DEVICES
    subprocess.run(whole, cwd=ROOT, check=True, capture_output=True, timeout=300, env=environment)

    run = start(train(tmp_path / "killed", compilation_cache))
    run.until(lambda: newest(tmp_path / "killed") >= SAVE)
    os.kill(run.worker(1), signal.SIGKILL)
    assert run.finish() == 0, run.output()[-5000:]

    assert run.output().count("devices: 1 local of 2 x cpu") == 2
    assert "resumed at step" in run.output()
    assert json.loads((tmp_path / "killed/result.json").read_text())["step"] == STEPS
    assert_same_bits(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_a_run_that_is_asked_to_stop_saves_and_asks_for_another_start(
    start, tmp_path, compilation_cache
):
    run = start(train(tmp_path / "run", compilation_cache, duration="100000 steps"))
    run.until(lambda: newest(tmp_path / "run") >= SAVE)
    run.driver.send_signal(signal.SIGTERM)
    assert run.finish() == 42, run.output()[-5000:]
    assert newest(tmp_path / "run") % SAVE, "the step at which it was asked to stop"


@pytest.mark.slow
def test_an_error_that_a_restart_will_not_cure_ends_the_run_with_its_code(start, tmp_path):
    # It has no dry run, so that the workers find out.
    run = start(["evaluate", f"--checkpoint={tmp_path}/none"], "--unchecked")
    assert run.finish() == 1, run.output()[-5000:]
    assert f"{tmp_path}/none" in run.output()
