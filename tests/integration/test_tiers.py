"""Checkpoints on the local disks of several real processes: which state a run goes on from when all
are killed and some disks are gone, full or damaged. The result is that of an undisturbed run.
"""

import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

import vit_jax
from tests.conftest import QUICK
from tests.integration.conftest import HOSTS
from tests.integration.test_hosts import assert_close, assert_read_in_order, newest
from tests.integration.test_reliability import all_bits, steps_done
from tests.integration.test_storage import fill
from tests.services.ports import free_port
from tests.waiting import until

EVERY, LOCAL = 10, 2  # steps between checkpoints in the workdir and on local disks
# Small arrays are sharded too: optimizer state over `data`, with `FSDP` parameters as well.
SHARDED = ("--config.mesh.fsdp_min_size=0",)
FSDP = ("--config.mesh.fsdp=2", *SHARDED)


def arguments(disks: pathlib.Path) -> tuple[str, ...]:
    """Each process has a disk of its own, as a host has."""
    return (
        f"--config.checkpoint.every={EVERY} steps",
        f"--config.checkpoint.local={disks}/{{process}}",
        f"--config.checkpoint.local_every={LOCAL} steps",
        "--config.duration=24 steps",
        "--config.eval.evaluators=()",
        "--config.audit.every=0",  # of processes: see `test_hosts.py`
        "--config.augment.mixup=0.0",
    )


def local_steps(disks: pathlib.Path, process: int) -> list[int]:
    names = [path.name for path in disks.glob(f"{process}/*/*") if path.suffix != ".new"]
    return sorted(int(name.split(".")[2]) for name in names)


def assert_same_bits(workdir, other) -> None:
    expected, got = all_bits(workdir), all_bits(other)
    assert expected.keys() == got.keys()
    for name in expected:
        np.testing.assert_array_equal(got[name], expected[name], err_msg=name)


def resumed_at(run) -> int:
    (line,) = [line for line in run.log(0).splitlines() if "resumed at step" in line]
    return int(line.split("resumed at step ")[1].split()[0])


def kill_all_after(run, workdir, step: int) -> None:
    run.until(lambda: steps_done(workdir) >= step)
    run.kill()


def logged(workdir) -> dict[int, list[list[float]]]:
    """What runs of one log line a step found at each step, to the bit; several times at one that was repeated."""
    names = ("loss", "accuracy", "gradient_norm", "update_norm", "parameter_norm")
    found = collections.defaultdict(list)
    for line in map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()):
        if "loss" in line:
            found[line["step"]].append([line[name] for name in names])
    return found


def test_two_processes_lose_a_disk_are_stopped_by_a_signal_to_one_and_one_goes_on(
    hosts, tiny_config, tmp_path, monkeypatch
):
    """And on machines that have compiled nothing yet: the programs are beside the run."""
    disks, workdir, steps = tmp_path / "disks", tmp_path / "run", 18
    monkeypatch.setenv("JAX_EXPLAIN_CACHE_MISSES", "1")
    new_machine = "--config.compilation_cache=auto"
    saves = ("--config.checkpoint.every=20 steps", "--config.checkpoint.local_every=6 steps")
    both = (*arguments(disks), *SHARDED, *saves, f"--config.duration={steps} steps")

    monkeypatch.setenv("HOME", str(tmp_path / "first"))
    run = hosts(workdir, *both, new_machine, seconds=0.024)
    kill_all_after(run, workdir, 8)
    killed = steps_done(workdir)
    shutil.rmtree(disks / "1")
    monkeypatch.setenv("HOME", str(tmp_path / "second"))
    rest = hosts(workdir, *both, new_machine, seconds=0.024)
    rest.until(lambda: "resumed at step" in rest.log(0) and steps_done(workdir) > killed)
    rest.processes[1].send_signal(signal.SIGTERM)
    assert rest.codes() == [42, 42], rest.log(0) + rest.log(1)
    compiled = "CACHE MISS for 'jit_train_step'"
    assert compiled in run.log(0) and compiled not in rest.log(0)
    assert "the missing shards of process 1 come from the others" in rest.log(0)
    resumed, stopped = resumed_at(rest), newest(workdir)
    assert 6 == resumed < killed < stopped < steps
    for process in range(2):
        assert f"stopped by SIGTERM after step {stopped} of {steps}" in rest.log(process)
    repeated = {step: found for step, found in logged(workdir).items() if len(found) > 1}
    assert list(repeated) == list(range(resumed + 1, killed + 1))
    assert all(first == second for first, second in repeated.values())

    # One process with two devices on another mesh takes over: parameters are sharded there too.
    last = hosts(workdir, *both, "--config.mesh.fsdp=2", processes=1, devices=2)
    assert last.codes() == [0], last.log(0)
    assert resumed_at(last) == stopped
    assert_read_in_order(last, 1, stopped, last=steps)
    assert not list(disks.glob("0/*")), "the end of a run frees its disk"
    # This process, of eight devices, computes the same.
    whole = {name.replace(".", "__"): value for name, value in HOSTS.items()}
    whole |= {
        "duration": f"{steps} steps",
        "augment__mixup": 0.0,
        "audit__every": 0,
        "eval__evaluators": (),
    }
    vit_jax.train(tiny_config(**whole), tmp_path / "whole")
    assert_close(tmp_path / "whole", workdir)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The workdir of the run of four processes that nothing happens to; made by the first test."""
    return tmp_path_factory.mktemp("undisturbed")


def lose_one(disks, run):
    shutil.rmtree(disks / "2")


def lose_both_holders(disks, run):
    """Of processes 0 and 2, or 1 and 3, one pair holds the same shards."""
    for process in range(1, 4):
        shutil.rmtree(disks / str(process))


def damage_one(disks, run):
    newest_file = max(disks.glob("1/*/*"), key=lambda path: int(path.name.split(".")[2]))
    content = bytearray(newest_file.read_bytes())
    content[-100] ^= 4
    newest_file.write_bytes(content)


def damage_newest_of_all(disks, run):
    for process in range(4):
        step = max(local_steps(disks, process))
        for path in disks.glob(f"{process}/*/*.{step}"):
            path.write_bytes(path.read_bytes()[:-7])


def nothing(disks, run):
    pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "what, at_least, logged",
    [
        (nothing, 14, ""),
        (lose_one, 14, "the missing shards of process 2 come from the others"),
        (damage_one, 14, "is damaged"),
        (damage_newest_of_all, 12, "is damaged"),
        (lose_both_holders, EVERY, ""),
    ],
)
def test_four_processes_go_on_from_the_newest_that_they_have_together(
    hosts, undisturbed, tmp_path, what, at_least, logged
):
    if not (undisturbed / "result.json").exists():
        whole = hosts(undisturbed, *arguments(tmp_path / "w"), *SHARDED, processes=4)
        assert whole.codes() == [0] * 4, whole.log(0)
    disks, workdir = tmp_path / "disks", tmp_path / "run"
    run = hosts(workdir, *arguments(disks), *SHARDED, processes=4, seconds=0.012)
    kill_all_after(run, workdir, 17)
    what(disks, run)
    rest = hosts(workdir, *arguments(disks), *SHARDED, processes=4)
    assert rest.codes() == [0] * 4, "".join(map(rest.log, range(4)))
    logs = "".join(map(rest.log, range(4)))
    assert resumed_at(rest) >= at_least and logged in logs
    if what is lose_both_holders:
        assert resumed_at(rest) == EVERY, "nobody has all shards: the workdir's is used"
    assert_same_bits(undisturbed, workdir)


@pytest.mark.slow
def test_a_full_disk_of_one_process_ends_nothing_and_its_peer_has_its_shards(
    hosts, undisturbed, tmp_path
):
    disks, workdir = tmp_path / "disks", tmp_path / "run"
    wide = ("--config.model.width=128",)
    whole = hosts(tmp_path / "whole", *arguments(tmp_path / "w"), *FSDP, *wide, processes=4)
    assert whole.codes() == [0] * 4, whole.log(0)
    late = "--config.checkpoint.every=100 steps"
    run = hosts(workdir, *arguments(disks), *FSDP, *wide, late, processes=4, seconds=0.012)
    run.until(lambda: local_steps(disks, 3))
    fill(run.processes[3])
    run.until(lambda: "cannot be written by 1 of 4 processes (process 3" in run.log(0))
    full = steps_done(workdir)
    kill_all_after(run, workdir, full + 6)
    assert max(local_steps(disks, 0)) > max(local_steps(disks, 3))
    rest = hosts(workdir, *arguments(disks), *FSDP, *wide, processes=4)
    assert rest.codes() == [0] * 4, rest.log(0)
    assert resumed_at(rest) >= full + 2
    assert_same_bits(tmp_path / "whole", workdir)


@pytest.mark.slow
def test_kills_at_any_time_cost_no_step_that_all_have_written(tmp_path):
    """SIGKILL for all of four processes at random times, many of them in the middle of a file, and the
    disk of one deleted after every second.
    """
    disks, workdir = tmp_path / "disks", tmp_path / "run"
    workdir.mkdir()
    random.seed(0)
    last, unfinished = 0, 0
    for start in range(7):
        port = free_port()
        logs = [tmp_path / f"{start}-{process}.log" for process in range(4)]
        children = [
            start_saving(process, port, disks, workdir, logs[process]) for process in range(4)
        ]

        def all_saved(children=children, logs=logs, last=last) -> bool:
            assert all(child.poll() is None for child in children), logs[0].read_text()
            return complete_step(disks) >= last + 3

        until(all_saved)
        time.sleep(random.uniform(0, 0.5))
        for child in children:
            child.kill()
        for child in children:
            child.wait()
        for log in logs:
            step, same = log.read_text().splitlines()[-1].split()
            assert int(step) >= last and same == "True", log.read_text()
        last = complete_step(disks)
        unfinished += len(list(disks.glob("*/*/*.new")))
        if start % 2:
            shutil.rmtree(disks / str(start % 4))
    assert unfinished, "no kill came in the middle of a file"


def start_saving(process: int, port: int, disks, workdir, log: pathlib.Path) -> subprocess.Popen:
    command = [
        sys.executable,
        "-m",
        "tests.integration.saving_locally",
        process,
        port,
        disks,
        workdir,
    ]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count=1 {QUICK}",
    }
    with log.open("w") as file:
        return subprocess.Popen(list(map(str, command)), stdout=file, env=environment)


def complete_step(disks: pathlib.Path) -> int:
    """The newest step that all four processes have written."""
    return min((max(local_steps(disks, process), default=0) for process in range(4)), default=0)
