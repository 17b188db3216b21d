"""The supervisor with real child processes: small programs in the place of vit_jax."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import pytest

from tests.as_from_a_shell import AS_FROM_A_SHELL
from tests.waiting import PATIENCE, until

LOCAL = pathlib.Path(__file__).resolve().parents[2] / "launch" / "local.py"

# Every program knows how often it was started.
HEAD = """
import json, os, pathlib, signal, subprocess, sys, time
process = int(os.environ.get("JAX_PROCESS_ID", 0))
workdir = pathlib.Path([a for a in sys.argv if a.startswith("--workdir=")][0].partition("=")[2])
workdir.mkdir(parents=True, exist_ok=True)
start = len(list(workdir.glob("logs/attempt-*")))
(workdir / f"pid-{process}").write_text(str(os.getpid()))
def wait():  # longer than tests do
    time.sleep(10_000)
def checkpoint(step):
    (workdir / "checkpoints" / str(step)).mkdir(parents=True, exist_ok=True)
"""
OBEDIENT = """
def leave(*_):
    print("saving", flush=True)
    time.sleep(0.3)
    checkpoint(7)
    sys.exit(42)
signal.signal(signal.SIGTERM, leave)
print("ready", flush=True)
"""


@pytest.fixture
def launch(tmp_path):
    """`launch(program, *options)`: a supervisor whose processes run `program`; killed at the end."""
    supervisors = []

    def start(program: str, *options: str) -> subprocess.Popen:
        (tmp_path / "vit_jax.py").write_text(HEAD + program)
        supervisors.append(
            subprocess.Popen(
                [*AS_FROM_A_SHELL, sys.executable, LOCAL, "--backoff=0.05"]
                + [f"--grace={PATIENCE}", *options]
                + ["--", "train", "--config=any", f"--workdir={tmp_path / 'run'}"],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
        return supervisors[-1]

    yield start
    for supervisor in supervisors:
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


def finish(supervisor: subprocess.Popen) -> tuple[int, str]:
    output, _ = supervisor.communicate(timeout=PATIENCE)
    return supervisor.returncode, output


def starts(tmp_path) -> int:
    return len(list((tmp_path / "run/logs").glob("attempt-*")))


def pids(tmp_path, count: int) -> list[int]:
    """Of the processes of the run, as soon as all of them have started and said so."""
    files = [tmp_path / "run" / f"pid-{process}" for process in range(count)]
    until(lambda: all(f.exists() and f.read_text() for f in files))
    return [int(f.read_text()) for f in files]


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has waited for yet does not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_each_process_gets_its_place_and_its_simulated_devices(launch, tmp_path):
    names = (
        "JAX_COORDINATOR_ADDRESS",
        "JAX_NUM_PROCESSES",
        "JAX_PROCESS_ID",
        "XLA_FLAGS",
        "JAX_PLATFORMS",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
    )
    program = f"print(json.dumps([os.environ[n] for n in {names}]), flush=True)"
    code, output = finish(launch(program, "--processes=3", "--devices_per_process=2"))
    assert code == 0
    told = [
        json.loads((tmp_path / "run/logs/attempt-1" / f"process-{i}.log").read_text())
        for i in range(3)
    ]
    address = told[0][0]
    for i, values in enumerate(told):
        assert values[:3] == [address, "3", str(i)]
        assert "--xla_force_host_platform_device_count=2" in values[3].split()
        assert "--xla_force_host_platform_device_count=8" not in values[3].split()
        assert values[4:] == ["cpu", str(i), "3"]
        assert f"[{i}] {json.dumps(values)}\n" in output


def test_one_process_finds_the_others_by_itself(launch):
    program = "print([n for n in os.environ if n in ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID')])"
    code, output = finish(launch(program))
    assert code == 0 and "[0] []" in output


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_that_a_restart_will_not_cure_ends_the_run_with_its_code(launch, tmp_path, code):
    program = f"sys.exit({code}) if process == 1 else wait()"
    got, output = finish(launch(program, "--processes=2"))
    assert got == code and starts(tmp_path) == 1
    assert f"process 1 ended with {code}" in output


@pytest.mark.parametrize("end", ["sys.exit(42)", "os.kill(os.getpid(), 9)", "os.abort()"])
def test_all_start_again_when_one_ends_too_early(launch, tmp_path, end):
    program = f"""
if start == 1:
    if process == 1: {end}
    wait()
print("done on start", start, flush=True)
"""
    code, output = finish(launch(program, "--processes=3"))
    assert code == 0
    assert starts(tmp_path) == 2
    assert "restart 1 of 5" in output and "[2] done on start 2" in output
    assert (tmp_path / "run/logs/attempt-2/process-2.log").read_text() == "done on start 2\n"


def test_a_process_killed_from_outside_and_a_survivor_that_ignores_everything(launch, tmp_path):
    program = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
while start == 1: time.sleep(0.01)
"""
    supervisor = launch(program, "--processes=2", "--grace=0.5")
    first, second = pids(tmp_path, 2)
    os.kill(first, signal.SIGKILL)
    code, output = finish(supervisor)
    assert code == 0 and "process 0 was ended by SIGKILL" in output
    assert not alive(second) and starts(tmp_path) == 2


def test_a_peer_that_reports_an_error_because_another_was_killed_does_not_end_the_run(
    launch, tmp_path
):
    program = """
if start == 1:
    if process == 0:
        time.sleep(0.5)
        os.kill(os.getpid(), 9)
    first = workdir / "pid-0"
    while not (first.exists() and first.read_text()): time.sleep(0.01)
    while "Z" not in pathlib.Path(f"/proc/{first.read_text()}/stat").read_text(): time.sleep(0.001)
    sys.exit(1)
"""
    code, _ = finish(launch(program, "--processes=2"))
    assert code == 0 and starts(tmp_path) == 2


def test_restarts_without_a_newer_checkpoint_are_counted_and_end_the_run(launch, tmp_path):
    code, output = finish(launch("sys.exit(42)", "--max_restarts=2"))
    assert code == 1 and starts(tmp_path) == 3
    assert "2 restarts without a newer one, giving up" in output


def test_a_newer_checkpoint_is_progress_and_a_half_written_one_is_not(launch, tmp_path):
    program = """
checkpoint(10 * min(start, 4))
checkpoint("1000.tmp")
sys.exit(42)
"""
    code, output = finish(launch(program, "--max_restarts=1"))
    assert code == 1
    assert starts(tmp_path) == 5  # 10, 20, 30, 40 and once more without progress.
    assert "last checkpoint: step 40" in output


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_and_saving_is_waited_for(launch, tmp_path, number):
    supervisor = launch(OBEDIENT + "wait()", "--processes=2")
    logs = [tmp_path / f"run/logs/attempt-1/process-{i}.log" for i in range(2)]
    until(lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    supervisor.send_signal(number)
    code, output = finish(supervisor)
    assert code == 42 and starts(tmp_path) == 1
    assert all(f"[{process}] saving" in output for process in range(2))
    assert (tmp_path / "run/checkpoints/7").exists()


def test_saving_is_waited_for_when_nobody_reads_the_output_any_longer(launch, tmp_path):
    supervisor = launch(OBEDIENT + "wait()")
    log = tmp_path / "run/logs/attempt-1/process-0.log"
    until(lambda: log.exists() and "ready" in log.read_text())
    supervisor.stdout.close()
    supervisor.send_signal(signal.SIGHUP)
    assert supervisor.wait(timeout=PATIENCE) == 42
    assert (tmp_path / "run/checkpoints/7").exists()


def test_a_second_signal_does_not_wait(launch, tmp_path):
    program = OBEDIENT.replace("time.sleep(0.3)", "wait()") + "wait()"
    supervisor = launch(program)
    log = tmp_path / "run/logs/attempt-1/process-0.log"
    for told in ("ready", "saving"):
        until(lambda told=told: log.exists() and told in log.read_text())
        supervisor.terminate()
    code, _ = finish(supervisor)
    assert code == 42 and not alive(pids(tmp_path, 1)[0])


def test_a_signal_between_two_attempts_ends_the_run(launch):
    supervisor = launch("sys.exit(42)", f"--backoff={2 * PATIENCE}")
    for line in supervisor.stdout:
        if "restarting all" in line:
            break
    supervisor.terminate()
    assert finish(supervisor)[0] == 42


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a feature of Linux")
def test_nothing_outlives_a_supervisor_that_is_killed(launch, tmp_path):
    supervisor = launch("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwait()", "--processes=2")
    children = pids(tmp_path, 2)
    supervisor.kill()
    until(lambda: not any(map(alive, children)))


def test_what_a_killed_process_had_started_is_ended_too(launch, tmp_path):
    program = """
if start == 1:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10_000)"])
    (workdir / "worker").write_text(str(worker.pid))
    os.kill(os.getpid(), 9)
"""
    assert finish(launch(program))[0] == 0
    worker = int((tmp_path / "run/worker").read_text())
    until(lambda: not alive(worker))


def test_output_without_an_end_of_line_and_of_other_encodings_is_shown(launch):
    program = "sys.stdout.buffer.write(b'\\xff\\xfe one\\ntwo'); sys.exit(0)"
    supervisor = launch(program)
    supervisor.stdout.reconfigure(errors="replace")
    code, output = finish(supervisor)
    assert code == 0 and " one\n[0] two\n" in output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--processes=2",), "command"),
        (("--processes=0", "--", "train"), "--processes=0: must be 1 or more"),
        (("--processes=two", "--", "train"), "'two'"),
        (("--max_restarts=-1", "--", "train"), "--max_restarts=-1"),
        (("--backoff=nan", "--", "train"), "--backoff=nan"),
        (("--what", "--", "train"), "--what"),
        (("--nodes=2", "--", "train"), "--nodes=2 needs --coordinator=HOST:PORT"),
        (("--node_rank=1", "--", "train"), "--node_rank=1: must be less than --nodes=1"),
    ],
)
def test_a_wrong_command_line_is_refused(arguments, words):
    command = [sys.executable, LOCAL, *arguments]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2 and words in result.stderr, result.stderr


# The files of the interpreter may be root's alone: the supervisor is read before the process is another user's.
WITHOUT_A_HOME = f"""
import os, runpy, sys
main = runpy.run_path({str(LOCAL)!r})["main"]
os.setuid(12345)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        ("--log_dir=~/logs", "--", "train", "--workdir=gs://bucket/run"),
        ("--", "train", "--workdir=~/run"),
    ],
)
def test_without_a_home_no_folder_is_made_that_is_called_by_its_sign(arguments, tmp_path):
    if os.getuid():
        pytest.skip("only root can take the number of a user without an entry")
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    command = [sys.executable, "-c", WITHOUT_A_HOME, *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "the home folder is not known" in done.stdout and "set HOME" in done.stdout
    assert list(tmp_path.iterdir()) == []
