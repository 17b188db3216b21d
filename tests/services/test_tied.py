"""Servers that tests start end with them, whatever ends the tests."""

import pathlib
import signal
import subprocess
import sys
import time

TIED = pathlib.Path(__file__).with_name("tied.py")
# Starts a server, prints its process number, and waits.
PARENT = f"""
import os, subprocess, sys, time
command = [sys.executable, "-c", "import time; time.sleep(60)"]
server = subprocess.Popen([sys.executable, {str(TIED)!r}, str(os.getpid()), *command])
print(server.pid, flush=True)
time.sleep(60)
"""


def runs(pid: int) -> bool:
    """Whether a process is there and has not ended."""
    status = pathlib.Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_a_server_ends_when_the_process_that_started_it_is_killed():
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    server = int(parent.stdout.readline())
    # Until then it has not asked the system for that.
    while b"sleep" not in pathlib.Path(f"/proc/{server}/cmdline").read_bytes():
        time.sleep(0.01)
    assert runs(server)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 10
    while runs(server) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not runs(server)
