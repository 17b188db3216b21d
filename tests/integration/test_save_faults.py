"""Several processes save to a bucket in which one object cannot be written: all learn it at once, the last good
checkpoint stays, and the next save works.
"""

import json
import os
import queue
import re
import resource
import subprocess
import sys
import threading

import numpy as np
import pytest

from tests.conftest import QUICK
from tests.services.ports import free_port
from tests.waiting import PATIENCE

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
    """Processes that save together, see `saving_together`. One that waited for the limit of saves would take 20
    minutes: longer than it is waited for.
    """

    def __init__(
        self, workdir: str, environment: dict[str, str], count: int = 2, minutes: float = 20
    ):
        port = free_port()
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
        return [lines.get(timeout=PATIENCE) for lines in self._lines]


def _collect(stdout, lines: queue.Queue) -> None:
    for line in stdout:
        if line.startswith("{"):  # and not what collectives of CPUs print
            lines.put(json.loads(line))


@pytest.fixture(scope="module")
def together(cloud_storage):
    """Two processes and the folder in a bucket that they save to."""
    run = Together(cloud_storage.new_bucket(), cloud_storage.environment)
    yield run
    run.close()


def assert_all_stop(together, faults, what: str, answer: str, **fault) -> None:
    """With a fault that lasts, a save fails in both processes, with a reason; the next one works."""
    before = together.save(4)[0]["steps"]
    faults.inject(methods=("POST", "PUT"), path=OBJECTS[what], **fault)
    reports = together.save(before[-1] + 4)
    faults.clear()
    assert all(re.search(answer, one["error"], re.IGNORECASE) for one in reports), reports
    assert all(one["steps"] == before for one in reports)
    print(what, fault, [one["seconds"] for one in reports])
    assert_saved(together, before[-1] + 8)


def assert_saved(together, step: int) -> None:
    """A save works, and gives the bits that were saved."""
    assert [one["error"] for one in together.save(step)] == ["", ""]
    assert together.save(step)[0]["steps"][-1] == step
    whole = np.arange(4096, dtype=np.float32) * 3 + step
    expected = [float(np.sum(part)) for part in np.split(whole, 2)]
    assert [(one["step"], one["sum"]) for one in together.restore()] == [
        (step, part) for part in expected
    ]


@pytest.mark.parametrize("what", OBJECTS)
def test_all_processes_learn_at_once_that_an_object_may_not_be_written(together, faults, what):
    assert_all_stop(together, faults, what, "forbidden|403", kind="status", status=403)


@pytest.mark.slow
@pytest.mark.parametrize("what", OBJECTS)
def test_all_processes_learn_at_once_that_an_object_has_no_place(together, faults, what):
    assert_all_stop(together, faults, what, "not.?found|404|gs://|/o", kind="status", status=404)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["status", "reset"])
@pytest.mark.parametrize(
    "what",
    ["the metadata of arrays", "the metadata of the step", "the description", "the commit mark"],
)
def test_all_processes_learn_that_an_object_is_out_of_reach_when_the_first_gives_up(
    together, faults, what, kind
):
    """gcsfs tries for half a minute, TensorStore much longer: see the next test."""
    assert_all_stop(together, faults, what, "5 minutes|503|injected|disconnected|reset", kind=kind)


def test_faults_that_pass_leave_the_bits_of_a_save_undisturbed(together, faults):
    assert_bits_with_passing_faults(together, faults, ("the commit mark",), ("lost",))


@pytest.mark.slow
def test_no_fault_that_passes_disturbs_the_bits_of_a_save(together, faults):
    kinds = ("status", "reset", "lost", "truncate")
    assert_bits_with_passing_faults(together, faults, tuple(OBJECTS), kinds)


def assert_bits_with_passing_faults(together, faults, objects, kinds) -> None:
    step = together.save(4)[0]["steps"][-1]
    for what in objects:
        for kind in kinds:
            step += 4
            # The emulator forgets an upload in parts that it has finished, which Cloud Storage does not.
            path = rf"^(?!.*upload_id).*{OBJECTS[what]}"
            faults.inject(kind, times=2, path=path)
            assert_saved(together, step)
            faults.clear()


@pytest.mark.slow
@pytest.mark.parametrize("what", ["a shard of process 0", "the merged index"])
def test_what_storage_does_not_answer_ends_at_the_limit_of_a_save(cloud_storage, faults, what):
    """TensorStore tries for a quarter of an hour."""
    run = Together(cloud_storage.new_bucket(), cloud_storage.environment, minutes=0.2)
    try:
        assert_all_stop(run, faults, what, "within 0.2 minutes", kind="status", status=503)
    finally:
        run.close()


# In a bucket they do above.
@pytest.mark.slow
def test_processes_that_save_to_a_folder_stop_at_once_too(tmp_path):
    run = Together(str(tmp_path / "run"), {})
    try:
        assert_saved(run, 4)
        full = run.processes[1].pid, resource.RLIMIT_FSIZE
        resource.prlimit(*full, (64, resource.RLIM_INFINITY))  # bytes of a file
        reports = run.save(8)
        assert all("process 1: " in one["error"] for one in reports), reports
        assert all(one["steps"] == [4] for one in reports)
        resource.prlimit(*full, (resource.RLIM_INFINITY,) * 2)
        assert_saved(run, 8)
    finally:
        run.close()
