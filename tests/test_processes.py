"""How processes find each other, agree, and tell who is missing."""

import os
import socket
import subprocess
import sys

import pytest

from tests.services.ports import free_port
from tests.waiting import PATIENCE
from vit_jax.base.errors import ConfigError
from vit_jax.devices import processes

VARIABLES = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node1",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    for name in (*VARIABLES, *SLURM, "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)


def test_alone_nothing_is_started_and_everything_is_answered_at_once():
    processes.initialize()
    assert (processes.index(), processes.count()) == (0, 1)
    assert (
        processes.gather("x", "said") == ["said"]
        and processes.broadcast_from_first("x", "said") == "said"
    )
    processes.barrier("x")


def test_a_coordinator_to_be_found_around_a_process_that_is_alone_is_none():
    processes.initialize(processes.AUTO, from_environment=False)
    assert processes.count() == 1


def test_a_slurm_job_of_one_task_is_one_process(monkeypatch):
    for name, value in (SLURM | {"SLURM_NTASKS": "1"}).items():
        monkeypatch.setenv(name, value)
    processes.initialize()
    assert processes.count() == 1


WRONG = {
    "two of three": ({"num_processes": 2, "process_id": 0}, {}, "--coordinator must be set too"),
    "one by variable": ({}, {"JAX_PROCESS_ID": "1"}, "--coordinator and --num_processes must be"),
    "no number": ({}, {"JAX_NUM_PROCESSES": "two"}, "JAX_NUM_PROCESSES=two is not a number"),
    "too many": (
        {"coordinator": "h:1", "num_processes": 2, "process_id": 2}, {},
        "--process_id=2 is not one of --num_processes=2",
    ),
    "no port": ({"coordinator": "h", "num_processes": 2, "process_id": 0}, {}, "is not HOST:PORT"),
}  # fmt: skip


@pytest.mark.parametrize("said, variables, message", WRONG.values(), ids=WRONG)
def test_what_is_said_by_halves_is_an_error(monkeypatch, said, variables, message):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        processes.initialize(**said)


TALK = """
import atexit, sys, threading
atexit.register(lambda: print(*(thread.name for thread in threading.enumerate())))
from vit_jax.devices import processes
processes.initialize(sys.argv[1], 3, int(sys.argv[2]))
print(processes.gather("numbers", str(processes.index() ** 2)), processes.broadcast_from_first("first", sys.argv[2]))
if processes.index() < 2:
    try:
        processes.barrier("lunch", minutes=0.1)
    except processes.HostsError as error:
        print(error)
processes.barrier("end")
"""


def test_three_processes_agree_and_tell_who_does_not_come():
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TALK, address, str(i)], stdout=subprocess.PIPE, text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )
        for i in range(3)
    ]  # fmt: skip
    told = [process.communicate(timeout=PATIENCE)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert [lines[0] for lines in told] == ["['0', '1', '4'] 0"] * 3
    for lines in told[:2]:
        assert lines[1] == "waited 0.1 minutes for the others at 'lunch': no sign of process 2"
    # None is in JAX's own code while Python ends, which would abort the process.
    assert [lines[-1] for lines in told] == ["MainThread"] * 3


BESIDE = """
import sys
from vit_jax.base.errors import UserError
from vit_jax.devices import processes
try:
    processes.initialize(sys.argv[1], 2, int(sys.argv[2]))
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
print("met", flush=True)
sys.stdin.readline()
print(processes.gather("numbers", sys.argv[2]))
"""


def test_a_second_process_1_is_refused_and_the_run_goes_on():
    address = f"127.0.0.1:{free_port()}"

    def start(number):
        return subprocess.Popen(
            [sys.executable, "-c", BESIDE, address, str(number)], stdin=subprocess.PIPE, text=True,
            stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )  # fmt: skip

    run = [start(0), start(1)]
    assert [process.stdout.readline() for process in run] == ["met\n"] * 2
    stranger = start(1)
    assert "cannot join the run" in stranger.communicate(timeout=PATIENCE)[0]
    assert stranger.returncode == 2
    for process in run:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.communicate(timeout=PATIENCE)[0] for process in run] == ["['0', '1']\n"] * 2
    assert [process.returncode for process in run] == [0, 0]


def test_a_held_port_is_a_sentence_of_process_0_final_at_a_first_start_only():
    with socket.socket() as held:
        held.bind(("127.0.0.1", free_port()))
        held.listen()
        address = f"127.0.0.1:{held.getsockname()[1]}"
        code = f"""
import sys
from vit_jax.base.errors import UserError
from vit_jax.devices import processes
try:
    processes.initialize({address!r}, 2, 0, wait_minutes=0.1)
except UserError as error:
    print(error)
    sys.exit(error.exit_code)
"""
        for restarts, expected in (("0", 2), ("1", 42)):
            ended = subprocess.run(
                [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE,
                env=os.environ | {"VIT_JAX_RESTARTS": restarts},
            )  # fmt: skip
            assert ended.returncode == expected, ended.stderr
            assert f"cannot listen on the port {address.rpartition(':')[2]}" in ended.stdout


def test_an_evaluation_joins_no_run_that_only_its_environment_names(monkeypatch):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", f"127.0.0.1:{free_port()}")
    monkeypatch.setenv("JAX_NUM_PROCESSES", "2")
    monkeypatch.setenv("JAX_PROCESS_ID", "1")
    processes.initialize(from_environment=False)
    assert processes.count() == 1


def test_an_evaluation_that_gets_a_part_of_the_flags_is_refused_and_does_not_go_alone():
    with pytest.raises(ConfigError, match="--coordinator must be set too"):
        processes.initialize(None, 2, 0, from_environment=False)
