"""How tests wait for threads and other processes: until something has happened, and not for a time."""

import concurrent.futures
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Any

# Seconds after which what a test waits for is taken to never come. It says nothing of how fast anything is, so a busy
# machine may need most of it.
PATIENCE = 900.0


def until(condition: Callable[[], Any], process: subprocess.Popen | None = None) -> None:
    """Waits until `condition()` holds, which must be while `process` runs, if there is one."""
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.005)


def returns(function: Callable[[], Any]) -> Any:
    """What `function()` returns, which runs in a thread of its own: if it never does, the test fails and goes on."""
    future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future.result(PATIENCE)
