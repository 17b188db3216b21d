"""A real SLURM cluster of two nodes on this machine, for the time of a test.

It is set up as strictly as sites do it: a job that asks for nothing gets one core, to which it is bound, and
little memory. Where the machine has cgroups of version 1 that may be written, they enforce it.
"""

import contextlib
import dataclasses
import getpass
import os
import pathlib
import random
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator

from tests.services.ports import free_port
from tests.waiting import PATIENCE

DAEMONS = ("munged", "slurmctld", "slurmd")
SYSTEM_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
_CONFIG = """
ClusterName=test
SlurmctldHost={host}
SlurmctldPort={ports[0]}
FirstJobId={first_job}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdParameters=config_overrides
GresTypes=gpu
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin={task_plugin}
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU={default_mib}
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
# The coordinator of a run is found by the name of its first node: this one can be resolved.
NodeName={host} NodeAddr=127.0.0.1 Port={ports[1]} {resources}
NodeName=zz-second NodeHostname=zz-second NodeAddr=127.0.0.1 Port={ports[2]} {resources}
PartitionName=all Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""
_CGROUP_CONFIG = """
CgroupPlugin=cgroup/v1
CgroupMountpoint={root}
ConstrainCores=yes
ConstrainRAMSpace=yes
"""
_CGROUPS = pathlib.Path("/sys/fs/cgroup")
CPUS = os.cpu_count()
# The memory of a node, as SLURM believes, and what a job gets for each core that it asks for.
NODE_MIB, DEFAULT_MIB = 8000, 200


def installed() -> bool:
    return all(shutil.which(daemon, path=SYSTEM_PATH) for daemon in (*DAEMONS, "sbatch"))


@dataclasses.dataclass
class Cluster:
    """Where its configuration is, and how to talk to it."""

    folder: pathlib.Path

    @property
    def environment(self) -> dict[str, str]:
        return {"SLURM_CONF": str(self.folder / "slurm.conf"), "PATH": SYSTEM_PATH}

    def command(self, *words: object, **options) -> str:
        """What a command of SLURM prints; raises if it fails."""
        options["env"] = os.environ | self.environment | options.pop("env", {})
        result = subprocess.run([*map(str, words)], capture_output=True, text=True, **options)
        assert result.returncode == 0, f"{words}: {result.stderr}"
        return result.stdout.strip()

    def state(self, job: str) -> str:
        """PENDING, RUNNING, COMPLETED, …"""
        return self._field(job, "JobState")

    def exit_code(self, job: str) -> int:
        return int(self._field(job, "ExitCode").partition(":")[0])

    def restarts(self, job: str) -> int:
        """How often it was queued again."""
        return int(self._field(job, "Restarts"))

    def start_again(self, job: str, restart: int = 1) -> None:
        """Waits until a job was queued again, and starts it soon: SLURM would wait two minutes, and
        nodes refuse a job that comes back in the same second.
        """
        deadline = time.monotonic() + PATIENCE
        while self.restarts(job) < restart:
            assert time.monotonic() < deadline, f"job {job} is {self.state(job)}"
            time.sleep(0.1)
        self.wait_for(job, "PENDING")
        self.command("scontrol", "update", f"JobId={job}", "StartTime=now+2")

    def wait_for(self, job: str, *states: str) -> str:
        deadline = time.monotonic() + PATIENCE
        while (state := self.state(job)) not in states:
            assert time.monotonic() < deadline, f"job {job} is {state}, not {states}"
            time.sleep(0.1)
        return state

    def resources(self, job: str) -> dict[str, str]:
        """What the job has got: {"cpu": "4", "mem": "16000M", "node": "2", …}"""
        return dict(pair.split("=") for pair in self._field(job, "TRES").split(","))

    def _field(self, job: str, name: str) -> str:
        words = self.command("scontrol", "--oneliner", "show", "job", job).split()
        return [w.partition("=")[2] for w in words if w.startswith(f"{name}=")][0]


@contextlib.contextmanager
def cluster(folder: pathlib.Path, gpus: int) -> Iterator[Cluster]:
    """Two nodes named after this machine, each with all of its cores; everything they need lies in
    `folder`.

    Args:
      folder: an empty one.
      gpus: of each node, as SLURM believes; they are empty files.
    """
    host = socket.gethostname().partition(".")[0]
    ports = [free_port() for _ in range(3)]
    cgroups = _has_cgroups()
    config = _CONFIG.format(
        folder=folder,
        host=host,
        user=getpass.getuser(),
        ports=ports,
        # A cgroup is named by its job, and other tests on this machine may have a cluster too.
        first_job=random.randrange(1, 1_000_000),
        task_plugin="task/affinity,task/cgroup" if cgroups else "task/affinity",
        default_mib=DEFAULT_MIB,
        resources=f"CPUs={CPUS} RealMemory={NODE_MIB} Gres=gpu:{gpus}",
    )
    devices = [folder / f"nvidia{number}" for number in range(gpus)]
    for device in devices:
        device.touch()
    (folder / "gres.conf").write_text("".join(f"Name=gpu File={path}\n" for path in devices))
    (folder / "slurm.conf").write_text(config)
    (folder / "cgroup.conf").write_text(_CGROUP_CONFIG.format(root=_CGROUPS) if cgroups else "")
    for name in ("state", f"spool-{host}", "spool-zz-second"):
        (folder / name).mkdir()
    key = folder / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    munge = [f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "key-file")]
    munge += [f"--{name}-file={folder}/munged.{name}" for name in ("pid", "log", "seed")]
    daemons = [
        ["munged", "--foreground", "--force", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", host],
        ["slurmd", "-D", "-N", "zz-second"],
    ]
    here = Cluster(folder)
    with contextlib.ExitStack() as running:
        running.callback(_remove_cgroups, host, "zz-second")
        for number, command in enumerate(daemons):
            log = running.enter_context((folder / f"daemon-{number}.log").open("wb"))
            program = shutil.which(command[0], path=SYSTEM_PATH)
            environment = os.environ | here.environment
            daemon = subprocess.Popen(
                [program, *command[1:]], stdout=log, stderr=log, env=environment
            )
            running.callback(_end, daemon)
            if command[0] == "munged":
                _wait(lambda: (folder / "munge.socket").exists(), folder)
        _wait(lambda: here.command("sinfo", "-h", "-o", "%t %D") == "idle 2", folder)
        try:
            yield here
        finally:  # What runs in a job does not end with the daemons.
            here.command("scancel", "--signal=KILL", "--full", "--user", getpass.getuser())
            here.command("scancel", "--user", getpass.getuser())
            _wait(lambda: not here.command("squeue", "--noheader"), folder)


def _has_cgroups() -> bool:
    """Whether SLURM can make cgroups of its own on this machine."""
    needed = [_CGROUPS / name / "tasks" for name in ("cpuset", "memory")]
    return all(path.exists() and os.access(path.parent, os.W_OK) for path in needed)


def _remove_cgroups(*nodes: str) -> None:
    """Removes what the nodes' daemons leave, except what those of another cluster still use."""
    for node in nodes:
        for folder in sorted(_CGROUPS.glob(f"*/slurm_{node}/**/"), reverse=True):
            with contextlib.suppress(OSError):
                folder.rmdir()


def _end(daemon: subprocess.Popen) -> None:
    daemon.terminate()
    try:
        daemon.wait(timeout=10)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _wait(condition, folder: pathlib.Path) -> None:
    deadline = time.monotonic() + PATIENCE
    while True:
        try:
            if condition():
                return
        except AssertionError:
            pass  # Not yet up.
        if time.monotonic() > deadline:
            logs = [log.read_text(errors="replace") for log in folder.glob("daemon-*.log")]
            raise AssertionError("the cluster did not start:\n" + "\n".join(logs))
        time.sleep(0.1)
