"""Every fault of a machine that is at hand, put on runs of real processes: they continue or end with the exit code
that `docs/training.md` has for it, and what is started again ends with the bits of an undisturbed run.
"""

import dataclasses
import errno
import os
import resource
import shutil
import signal
import time
from collections.abc import Callable

import pytest

from tests.integration.faulty_machine import FaultyMachine
from tests.integration.test_audit import assert_same_bits
from tests.integration.test_hosts import newest
from tests.integration.test_reliability import steps_done
from tests.integration.test_tiers import local_steps

DAY = 86_400
ENDED_BY_PEERS = (42, -signal.SIGABRT)  # JAX's own reaction to a dead process may be faster
# Saved after the first signal, or ended by a later one: by the handler, or by the system.
ENDED_BY_SIGNALS = (42, 128 + signal.SIGTERM, -signal.SIGTERM)
FLAGS = (
    "--config.checkpoint.every=2 steps",
    "--config.checkpoint.max_failures=2",
    "--config.duration=16 steps",
    "--config.eval.evaluators=()",
    "--config.mesh.fsdp_min_size=0",
    "--config.audit.every=2",
)


@dataclasses.dataclass
class Disturbed:
    """A run under way: its processes, their machine, its workdir, and the folder of their local disks."""

    run: object
    machine: FaultyMachine
    workdir: object
    disks: object

    def until(self, condition) -> None:
        self.run.until(condition)

    def until_step(self, step: int) -> None:
        self.until(lambda: steps_done(self.workdir) >= step)

    def signal(self, number: int, process: int = 0) -> None:
        self.run.processes[process].send_signal(number)

    def all_end_after(self, step: int) -> None:
        self.until_step(step)
        self.run.kill()


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault, and how the run ends that it is put on.

    Attributes:
      disturb: makes it, after some steps.
      codes: for each process the exit codes that it may end with.
      quiet: whether no traceback may be printed.
      said: what the log of a process says.
      flags, observed: of the run; see `hosts`.
      restart: what is wrong with the files of the checkpoints at the next start; see `FaultyMachine.set`.
      restart_code: which then ends with this exit code, and changes nothing.
    """

    disturb: Callable[[Disturbed], None]
    codes: tuple[tuple[int, ...], ...]
    said: str = ""
    flags: tuple[str, ...] = ()
    observed: dict = dataclasses.field(default_factory=dict)
    restart: dict = dataclasses.field(default_factory=dict)
    restart_code: int = 0
    quiet: bool = True


def disk(process: int = 0, **fault):
    """The disk of the checkpoints is faulty."""

    def disturb(it: Disturbed) -> None:
        it.machine.set(process, it.workdir / "checkpoints", **fault)
        if fault.get("times", 0) == 1:
            it.until(lambda: it.machine.failed(process))
        else:
            it.run.codes()

    return disturb


def whole_disk_is_full_for_a_while(it: Disturbed) -> None:
    it.machine.set(0, it.workdir, writing=errno.ENOSPC)
    it.until(lambda: "failure 1 of" in it.run.log(0))
    it.machine.set()


def kill(it: Disturbed) -> None:
    it.all_end_after(7)


def clock(*seconds: int, process: int = 0):
    def disturb(it: Disturbed) -> None:
        for jump in seconds:
            it.machine.set(process, seconds=jump)
            done = steps_done(it.workdir)
            it.until(lambda done=done: steps_done(it.workdir) > done)

    return disturb


def clock_is_back_at_the_restart(it: Disturbed) -> None:
    clock(DAY)(it)
    it.all_end_after(9)


def descriptors(it: Disturbed) -> None:
    process = it.run.processes[0]
    used = len(os.listdir(f"/proc/{process.pid}/fd"))
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (used, used))


def storm(*processes: int):
    def disturb(it: Disturbed) -> None:
        for _ in range(40):
            for process in processes:
                it.signal(signal.SIGTERM, process)
            time.sleep(0.03)

    return disturb


def peer_dies(it: Disturbed) -> None:
    it.signal(signal.SIGKILL, 1)


def peer_freezes(it: Disturbed) -> None:
    it.signal(signal.SIGSTOP, 1)
    it.run.processes[0].wait(60)
    it.run.processes[1].kill()


def tier_fails_for_a_while(it: Disturbed) -> None:
    it.machine.set(0, it.disks, syncing=errno.EIO)
    it.until(lambda: "cannot be written by 1 of 1" in it.run.log(0))
    it.machine.set()
    it.until(lambda: "local checkpoints are written again" in it.run.log(0))
    it.all_end_after(steps_done(it.workdir) + 2)


def tier_loses_a_disk(it: Disturbed) -> None:
    it.until(lambda: local_steps(it.disks, 1))
    it.machine.set(1, it.disks, writing=errno.EIO)
    shutil.rmtree(it.disks / "1")
    it.until(lambda: "cannot be written by 1 of 2 processes (process 1" in it.run.log(0))
    it.all_end_after(steps_done(it.workdir) + 1)


def all_checkpoints_are_damaged_but_a_tier(it: Disturbed) -> None:
    it.until(lambda: max(local_steps(it.disks, 0), default=0) >= 5)
    it.run.kill()
    for file in it.workdir.glob("checkpoints/*/description/metadata"):
        file.write_bytes(file.read_bytes()[:-9])


TIERS = (
    "--config.checkpoint.local={disks}/{process}",
    "--config.checkpoint.local_every=1 steps",
)
PATIENCE = ("--config.hosts.heartbeat_seconds=10",)
KILLED = ((-signal.SIGKILL,),)
FAULTS = {
    "EIO at one write": Fault(disk(writing=errno.EIO, times=1), ((0,),), "failure 1 of 2 in a row"),
    "EIO at one sync": Fault(disk(syncing=errno.EIO, times=1), ((0,),), "failure 1 of 2 in a row"),
    "EIO at one write of a peer": Fault(
        disk(1, writing=errno.EIO, times=1), ((0,), (0,)), "process 1: "
    ),
    "EIO at all writes": Fault(disk(writing=errno.EIO), ((1,),), "These were 2 failures in a row"),
    "ENOSPC at all writes": Fault(
        disk(writing=errno.ENOSPC), ((1,),), "These were 2 failures in a row"
    ),
    "a full disk for a while": Fault(
        whole_disk_is_full_for_a_while,
        ((0,),),
        "metrics cannot be written",
        flags=("--config.checkpoint.max_failures=9",),  # a step takes less than it does to see one
    ),
    "EIO at all reads of a restart": Fault(
        kill, KILLED, restart={"reading": errno.EIO}, restart_code=1
    ),
    "no descriptors at a restart": Fault(
        kill, KILLED, restart={"opening": errno.EMFILE}, restart_code=42
    ),
    "no descriptors for the arrays at a restart": Fault(
        kill, KILLED, restart={"below": "/state/manifest.ocdbt", "opening": errno.EMFILE}, restart_code=42
    ),
    "a clock that jumps": Fault(clock(DAY, -DAY, 0), ((0,),)),
    "a clock of a peer that jumps": Fault(clock(DAY, -DAY, process=1), ((0,), (0,))),
    "a clock that is back at the restart": Fault(clock_is_back_at_the_restart, KILLED),
    "a reader that hangs": Fault(
        lambda it: None, ((42,),), "nothing has moved for 0.05 minutes",
        ("--config.hosts.step_minutes=0.05",), {"process": 0, "example": 300, "action": "block"},
    ),
    "a peer that dies": Fault(
        peer_dies, (ENDED_BY_PEERS, (-signal.SIGKILL,)), flags=PATIENCE, quiet=False,
    ),
    "a peer that freezes": Fault(
        peer_freezes, (ENDED_BY_PEERS, (-signal.SIGKILL,)), flags=PATIENCE, quiet=False,
    ),
    "a tier that fails for a while": Fault(tier_fails_for_a_while, KILLED, flags=TIERS),
    "a tier that loses a disk": Fault(tier_loses_a_disk, KILLED * 2, flags=TIERS),
    "all checkpoints damaged, and a good tier": Fault(
        all_checkpoints_are_damaged_but_a_tier, KILLED, flags=TIERS
    ),
    # Python itself prints what it cannot close of an event loop that it could not open.
    "no descriptors": Fault(descriptors, ((0, 1, 42),), quiet=False),
    "a storm of SIGTERM": Fault(storm(0), (ENDED_BY_SIGNALS,)),
    "a storm of SIGTERM for all": Fault(storm(0, 1), (ENDED_BY_SIGNALS,) * 2),
}  # fmt: skip


def files_of_whole_checkpoints(workdir) -> list:
    folders = [p for p in (workdir / "checkpoints").iterdir() if p.name.isdigit()]
    return sorted(file for folder in folders for file in folder.rglob("*"))


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return FaultyMachine(tmp_path_factory.mktemp("machine"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder for the undisturbed runs: by the number of processes, and with local checkpoints or without, which make
    two replicas in the mesh, and another order of sums. The first test that needs one trains it.
    """
    return tmp_path_factory.mktemp("undisturbed")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("cc"), reason="the faulty machine is compiled with cc")
@pytest.mark.parametrize("what", FAULTS)
def test_a_run_ends_as_documented_and_started_again_it_has_the_same_bits(
    hosts, machine, undisturbed, tmp_path, monkeypatch, what
):
    fault, workdir, disks = FAULTS[what], tmp_path / "run", tmp_path / "disks"
    flags = (*FLAGS, *(flag.replace("{disks}", str(disks)) for flag in fault.flags))
    count, tiers = len(fault.codes), TIERS if fault.flags == TIERS else ()
    expected = undisturbed / f"{count}{'-local' if tiers else ''}"
    if not expected.exists():
        own_disks = [flag.replace("{disks}", f"{expected}-disks") for flag in tiers]
        whole = hosts(expected, *FLAGS, *own_disks, processes=count)
        assert whole.codes() == [0] * count, whole.log(0)
    for process in range(count):
        machine.set(process)
    for name, value in machine.environment.items():
        monkeypatch.setenv(name, value)

    run = hosts(workdir, *flags, processes=count, seconds=0.02, **fault.observed)
    it = Disturbed(run, machine, workdir, disks)
    it.until_step(5)
    fault.disturb(it)
    codes, logs = run.codes(), "".join(map(run.log, range(count)))
    assert all(code in of for code, of in zip(codes, fault.codes, strict=True)), (codes, logs)
    assert fault.said in logs and not (fault.quiet and "Traceback" in logs), logs

    if fault.restart:
        before = files_of_whole_checkpoints(workdir)
        machine.set(0, **{"below": workdir / "checkpoints"} | fault.restart)
        unread = hosts(workdir, *flags, processes=count)
        assert unread.codes() == [fault.restart_code], unread.log(0)
        assert "Traceback" not in unread.log(0), unread.log(0)
        assert files_of_whole_checkpoints(workdir) == before
    for process in range(count):
        machine.set(process)
    rest = hosts(workdir, *flags, processes=count)
    assert rest.codes() == [0] * count, "".join(map(rest.log, range(count)))
    assert newest(workdir) == 16
    assert_same_bits(expected, workdir)
