"""Servers that tests start end with them, whatever ends the tests."""

import pathlib
import signal
import subprocess
import sys

from tests.waiting import until

TIED = pathlib.Path(__file__).with_name("tied.py")
# Starts a server, prints its process number, and waits.
PARENT = f"""
import os, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(10_000)"]
server = subprocess.Popen([sys.executable, {str(TIED)!r}, str(os.getpid()), *command])
print(server.pid, flush=True)
time.sleep(10_000)
"""


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    status = pathlib.Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_ends_when_the_process_that_started_it_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    # Until then it has not asked the system for that.
    until(lambda: b"sleep" in pathlib.Path(f"/proc/{server}/cmdline").read_bytes())
    assert runs(server)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    until(lambda: not runs(server))
