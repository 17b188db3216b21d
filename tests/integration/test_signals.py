"""How commands end before they are done: Ctrl-C once and twice, a closed pipe, too little memory."""

import contextlib
import errno
import json
import os
import pathlib
import pty
import re
import select
import signal
import subprocess
import sys
import threading
import time

import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from tests.as_from_a_shell import AS_FROM_A_SHELL
from tests.conftest import QUICK
from tests.integration.conftest import TINY
from tests.test_terminal import screen
from tests.waiting import PATIENCE, until
from vit_jax.checkpoints import reading
from vit_jax.commands import exit_codes

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture
def start():
    """`start(*command, **environment)`: a Python process that Ctrl-C reaches as in a terminal; tests
    that run in the background ignore it, and so would what they start.
    """
    with contextlib.ExitStack() as stack:

        def begin(*command, **environment) -> subprocess.Popen:
            process = subprocess.Popen(
                [*AS_FROM_A_SHELL, sys.executable, *map(str, command)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env=os.environ | {"XLA_FLAGS": QUICK, "JAX_PLATFORMS": "cpu"} | environment,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            return process

        yield begin


# An image of the seventh batch. It is never of the first one, which would not come then: one thread reads, in order.
# Where reads wait, as on a busy machine, 256 threads would read ahead at once, in any order.
BEYOND = 200
IN_ORDER = {"data.threads": 1, "data.read_ahead": 0}


@pytest.fixture
def training(compilation_cache, tmp_path) -> list[str]:
    """The arguments of a run that does not end soon."""
    options = TINY | IN_ORDER | {"duration": "100000 steps", "compilation_cache": compilation_cache}
    overrides = [f"--config.{name}={value}" for name, value in options.items()]
    return ["train", "--config=configs/digits.py", f"--workdir={tmp_path}", *overrides]


@pytest.mark.parametrize(
    "command", [["models"], ["benchmark", "step", "--config=configs/digits.py"]]
)
def test_ctrl_c_ends_a_command_with_a_line_and_130(start, command):
    process = start("-m", "vit_jax", *command)
    maps = pathlib.Path(f"/proc/{process.pid}/maps")
    until(lambda: "jaxlib" in maps.read_text(), process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, "", "vit_jax: stopped\n")


def test_ctrl_c_that_a_library_swallows_ends_the_command_all_the_same(start):
    script = """
import os, signal, time
from vit_jax.commands import exit_codes
with exit_codes.report_errors():
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except KeyboardInterrupt:
        time.sleep(10_000)
"""
    out, err = (process := start("-c", script)).communicate(timeout=PATIENCE)
    assert (process.returncode, out, err) == (130, "", "vit_jax: stopped\n")


@pytest.mark.slow
def test_a_signal_that_comes_twice_at_once_is_one_and_the_run_is_saved(start, training, tmp_path):
    process = start("-m", "vit_jax", *training)
    until((tmp_path / "checkpoints" / "4").exists, process)
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 42 and "Traceback" not in err, err
    assert err.count("vit_jax: SIGINT: saving after the steps under way") == 1
    assert "stopped by SIGINT after step" in err


# That one stops which waits so is of the next quick test, SIGTERM of `test_tiers.py`.
@pytest.mark.slow
def test_a_run_that_waits_for_an_image_stops_all_the_same_and_is_saved(start, training, tmp_path):
    blocked = {"folder": str(tmp_path), "process": 0, "example": BEYOND, "action": "block"}
    process = start("-m", "tests.integration.observed", *training, OBSERVED=json.dumps(blocked))
    until((tmp_path / "fifo").exists, process)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 42 and "Traceback" not in err, err
    step = re.search(r"stopped by SIGTERM after step (\d) of 100000; saved", err)[1]
    assert (tmp_path / "checkpoints" / step).exists()


@pytest.fixture
def terminal():
    """`terminal(command, **environment)`: a process in a terminal, what closes that, and what it has written."""
    with contextlib.ExitStack() as stack:

        def begin(command, **environment):
            master, slave = pty.openpty()
            process = subprocess.Popen(
                [*AS_FROM_A_SHELL, *command],
                stdin=slave,
                stdout=slave,
                stderr=slave,
                cwd=ROOT,
                env=os.environ
                | {"XLA_FLAGS": QUICK, "JAX_PLATFORMS": "cpu", "CI": ""}
                | environment,
                start_new_session=True,
            )
            os.close(slave)
            stack.callback(process.wait)
            stack.callback(process.kill)
            written, closing = bytearray(), threading.Event()

            def read() -> None:
                try:
                    while not closing.is_set():
                        if select.select([master], [], [], 0.1)[0]:
                            written.extend(os.read(master, 65536))
                except OSError as error:  # the process has ended
                    assert error.errno == errno.EIO
                os.close(master)

            reading = threading.Thread(target=read)
            reading.start()

            def close() -> None:
                closing.set()
                reading.join()

            return process, close, written

        yield begin


def test_a_run_whose_terminal_is_closed_is_saved(terminal, training, tmp_path):
    blocked = {"folder": str(tmp_path), "process": 0, "example": BEYOND, "action": "block"}
    command = [sys.executable, "-m", "tests.integration.observed", *training]
    process, close, written = terminal(command, OBSERVED=json.dumps(blocked))
    status = rb"\rstep \d+ of 100,000 \(0%\)  \d.* left  loss \d"
    until(lambda: (tmp_path / "fifo").exists() and re.search(status, bytes(written)), process)
    logged = r"[\d:]+ I step 1  loss .* left$"
    until(lambda: any(re.match(logged, line) for line in screen(bytes(written))[0]), process)
    close()
    assert process.wait(timeout=PATIENCE) == 42
    assert reading.saved_steps(epath.Path(tmp_path) / "checkpoints")


@pytest.mark.slow
def test_under_nohup_a_run_outlives_its_terminal(terminal, training, tmp_path):
    shell = ["sh", "-c", f'exec nohup "$@" > {tmp_path}/log 2>&1', "sh"]
    process, close, _ = terminal([*shell, sys.executable, "-m", "vit_jax", *training])
    steps = tmp_path / "checkpoints"
    until((steps / "4").exists, process)
    close()
    newest = max(reading.saved_steps(epath.Path(steps)))
    until(lambda: max(reading.saved_steps(epath.Path(steps))) >= newest + 40, process)


def test_the_first_ctrl_c_says_at_once_that_it_saves_and_the_second_ends_the_run(
    start, training, tmp_path
):
    # An image that takes forever to read: the evaluation does not end.
    blocked = {"folder": str(tmp_path), "process": 0, "example": 40, "action": "block"}
    blocked["split"], training = "test", [*training, "--config.eval.every=1 steps"]
    process = start("-m", "tests.integration.observed", *training, OBSERVED=json.dumps(blocked))
    until((tmp_path / "fifo").exists, process)
    process.send_signal(signal.SIGINT)
    until(lambda: "SIGINT: saving" in process.stderr.readline(), process)
    time.sleep(0.6)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130 and "Traceback" not in err, err
    assert err.endswith("vit_jax: SIGINT again: ended without saving\n")


@pytest.mark.parametrize(
    "command", [["--help"], pytest.param(["train", "--help"], marks=pytest.mark.slow)]
)
def test_a_closed_pipe_ends_a_command_quietly(start, command):
    process = start("-m", "vit_jax", *command)
    process.stdout.close()
    err = process.stderr.read()
    assert (process.wait(timeout=PATIENCE), err) == (141, "")


@pytest.mark.parametrize("full, where", [(jnp.zeros, "a device"), (np.zeros, "the host")])
def test_too_little_memory_is_said_with_what_helps(full, where, capsys):
    on_interrupt = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as ended, exit_codes.report_errors():
        full((2**24, 2**24), "uint8")  # more than any machine's addresses
    signal.signal(signal.SIGINT, on_interrupt)
    err = capsys.readouterr().err
    assert ended.value.code == 1 and f"vit_jax: {where} is out of memory" in err
    for advice in ("config.batch_size", "config.accumulate=4", "config.model.remat=full"):
        assert advice in err
