"""Disks that fill up: what is saved stays, and the run goes on as long as there is hope."""

import resource

import numpy as np
import pytest

from tests.integration.test_hosts import FSDP, newest
from tests.integration.test_reliability import bits

# Files may grow to so many bytes: logs fit, the arrays of a checkpoint do not.
FULL, FREE = (2**18, resource.RLIM_INFINITY), (resource.RLIM_INFINITY,) * 2
WIDE = (
    "--config.model.width=128", "--config.checkpoint.every=2 steps", "--config.audit.every=0",
    "--config.augment.mixup=0.0", "--config.eval.evaluators=()",
)  # fmt: skip


def fill(process) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, FULL)


def free(process) -> None:
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, FREE)


def test_a_save_that_fails_is_told_and_the_next_one_is_tried(hosts, tmp_path):
    patient = "--config.checkpoint.max_failures=1000"
    shorter = "--config.duration=8 steps"
    run = hosts(tmp_path, *WIDE, patient, shorter, processes=1, seconds=0.012)
    run.until((tmp_path / "checkpoints" / "2").exists)
    fill(run.processes[0])
    run.until(lambda: "failure 1 of 1000 in a row" in run.log(0))
    assert newest(tmp_path) == 2 and bits(tmp_path)
    free(run.processes[0])
    assert run.codes() == [0], run.log(0)
    assert newest(tmp_path) == 8 and bits(tmp_path)
    assert not [p for p in (tmp_path / "checkpoints").iterdir() if "tmp" in p.name]


@pytest.mark.slow
def test_a_disk_that_stays_full_ends_the_run_with_the_last_good_checkpoint(hosts, tmp_path):
    first = hosts(tmp_path, *WIDE, "--config.duration=4 steps", processes=1)
    assert first.codes() == [0], first.log(0)
    kept = bits(tmp_path)
    second = hosts(
        tmp_path, *WIDE, "--config.checkpoint.on_config_change=allow",
        "--config.checkpoint.max_failures=2", processes=1,
    )  # fmt: skip
    fill(second.processes[0])
    assert second.codes() == [1], second.log(0)
    log = second.log(0)
    assert "cannot write the checkpoint of step 6 to" in log and "failure 1 of 2 in a row" in log
    assert "These were 2 failures in a row" in log and "the last good checkpoint is kept" in log
    assert "Event loop is closed" not in log and "Traceback" not in log
    for name, value in bits(tmp_path).items():
        np.testing.assert_array_equal(kept[name], value)


@pytest.mark.slow
def test_a_disk_that_is_full_for_one_of_two_processes_stops_neither(hosts, tmp_path):
    run = hosts(tmp_path, *WIDE, *FSDP, "--config.hosts.wait_minutes=0.3", seconds=0.018)
    run.until((tmp_path / "checkpoints" / "2").exists)
    fill(run.processes[1])
    run.until(lambda: "failure 1 of 3 in a row" in run.log(0))
    free(run.processes[1])
    assert run.codes() == [0, 0], run.log(0) + run.log(1)
    assert newest(tmp_path) == 12 and bits(tmp_path)
