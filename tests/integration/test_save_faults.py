"""Several processes save to a bucket in which one object cannot be written: all learn it at once, the last good
checkpoint stays, and the next save works.
"""

import json
import os
import queue
import re
import socket
import subprocess
import sys
import threading

import pytest

from tests.conftest import QUICK

# What each fault is put on: a shard of either process, the metadata, what makes a checkpoint whole.
OBJECTS = {
    "a shard of process 0": r"ocdbt\.process_0",
    "a shard of process 1": r"ocdbt\.process_1",
    "the merged index": r"state/(d/|manifest)",
    "the metadata of arrays": r"/_METADATA",
    "the metadata of the step": r"_CHECKPOINT_METADATA",
    "the description": r"description/metadata",
    "the commit mark": r"checkpoints/\d+/commit_success",
}


class Together:
    """Processes that save together, see `saving_together`."""

    PATIENCE = 120  # seconds; a process that waited for the limit of saves would take 20 minutes

    def __init__(
        self, workdir: str, environment: dict[str, str], count: int = 2, minutes: float = 20
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        environment = os.environ | environment | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
        pipe, self._lines = subprocess.PIPE, [queue.Queue() for _ in range(count)]
        self.processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.integration.saving_together",
                 str(i), str(count), str(port), workdir, str(minutes)],
                stdin=pipe, stdout=pipe, text=True, env=environment,
            )
            for i in range(count)
        ]  # fmt: skip
        for process, lines in zip(self.processes, self._lines, strict=True):
            threading.Thread(target=_collect, args=(process.stdout, lines), daemon=True).start()
        self._answers()

    def save(self, step: int) -> list[dict]:
        """What each process reports of the save of a step."""
        return self._ask(f"{step}")

    def restore(self) -> list[dict]:
        """The newest step, and sums of the bits of each process."""
        return self._ask("")

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def _ask(self, line: str) -> list[dict]:
        for process in self.processes:
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
        return self._answers()

    def _answers(self) -> list[dict]:
        return [lines.get(timeout=self.PATIENCE) for lines in self._lines]


def _collect(stdout, lines: queue.Queue) -> None:
    for line in stdout:
        if line.startswith("{"):  # and not what collectives of CPUs print
            lines.put(json.loads(line))


@pytest.fixture(scope="module")
def together(cloud_storage):
    """Two processes and the folder in a bucket that they save to."""
    bucket = cloud_storage.new_bucket()
    run = Together(bucket, cloud_storage.environment)
    yield run
    run.close()


@pytest.mark.parametrize("what", OBJECTS)
def test_all_processes_learn_at_once_that_one_object_cannot_be_written(together, faults, what):
    good = together.save(4)[0]["steps"]
    faults.inject("status", status=403, methods=("POST", "PUT"), path=OBJECTS[what])
    said = together.save(good[-1] + 4)
    print(what, said)
    faults.clear()
    assert all(re.search("forbidden|403", one["error"], re.IGNORECASE) for one in said), said
    assert all(one["steps"] == good for one in said)
