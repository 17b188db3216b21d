"""Runs vit_jax as several processes on this machine and starts them again when they end too early. `vit_jax launch
local` checks the training command and calls this; workers of a cluster, whose command was checked, run it as it is:

  python launch/local.py --processes=4 --devices_per_process=2 -- train --config=digits --workdir=/tmp/digits

When a process dies, the others are ended and all start again, from the last checkpoint: after a
pause that doubles, and at most --max_restarts times in a row without a newer checkpoint. SIGTERM
and SIGINT are passed on, the processes save, and nothing is started again; a second one kills.

With one process (the default) it does the same for one host of a pod, where JAX finds the others. With --nodes it
does so for the processes of one node of several, each of which calls it with its own --node_rank.
What a process itself does about a signal, a dead peer or a step that hangs is not decided here, but
in vit_jax. Standard library only.

Exit codes: 0 done; 1 error, or no progress; 2 the command line or the config is wrong; 42 stopped by
a signal after saving, start me again.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import hashlib
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time

AGAIN = 42
HOPELESS = (1, 2)  # What a restart will not cure.
LONGEST_PAUSE = 300.0
LEAST = {
    "processes": 1, "devices_per_process": 0, "nodes": 1, "node_rank": 0, "max_restarts": 0, "backoff": 0, "grace": 0,
}  # fmt: skip
POLL = 0.05
# Prints the names of the whole checkpoints in a bucket, where folders cannot be renamed and a file
# marks what is whole. A process of its own: a library for buckets has threads, and this one forks.
IN_BUCKET = """
import sys
from etils import epath
print(*(mark.parent.name for mark in epath.Path(sys.argv[1]).glob("*/commit_success.txt")))
"""


def main(arguments: list[str] | None = None) -> int:
    """Runs what the command line asks for, and gives the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="local.py [options] -- COMMAND_OF_VIT_JAX …",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--processes", type=int, default=1, help="how many on this machine")
    add("--devices_per_process", type=int, default=0, help="simulated CPU devices; 0: real ones")
    add("--nodes", type=int, default=1, help="machines that do the same")
    add("--node_rank", type=int, default=0, help="which of them this is")
    add("--coordinator", help="HOST:PORT of the first one; default: a free port of this machine")
    add("--max_restarts", type=int, default=5, help="in a row without a newer checkpoint")
    add("--backoff", type=float, default=1.0, help="seconds before a restart; doubles each time")
    add("--grace", type=float, default=20.0, help="seconds others have to end after one did")
    add("--log_dir", help="output of each process; default: WORKDIR/logs")
    add("command", nargs="+", help="of vit_jax: train --config=FILE --workdir=DIR …")
    options = vars(parser.parse_args(arguments))
    for name, least in LEAST.items():
        if not options[name] >= least:
            parser.error(f"--{name}={options[name]}: must be {least} or more")
    if options["node_rank"] >= options["nodes"]:
        parser.error(
            f"--node_rank={options['node_rank']}: must be less than --nodes={options['nodes']}"
        )
    if options["nodes"] > 1 and not options["coordinator"]:
        parser.error(f"--nodes={options['nodes']} needs --coordinator=HOST:PORT")
    command = options.pop("command")
    workdir = workdir_of(command)
    log_dir = options["log_dir"]
    if log_dir is None:
        local = workdir if workdir and "://" not in workdir else tempfile.mkdtemp()
        log_dir = os.path.join(local, "logs")
    options["log_dir"] = expanded(log_dir)
    command = [sys.executable, "-m", "vit_jax", *command]
    local = value_of(command, "--config.checkpoint.local")
    return Supervisor(command=command, workdir=workdir, local=local, **options).run()


@dataclasses.dataclass
class Supervisor:
    """Starts all processes of a run until it is done, hopeless, or stopped by a signal.

    Attributes:
      command: of one process; all get the same.
      workdir: where the run saves; a newer checkpoint there is what counts as progress.
      local: where it saves on this machine's disks, which counts too.
      log_dir: gets attempt-N/process-P.log.
      processes: how many on this machine.
      nodes: machines that run as many.
      node_rank: which of them this is.
      coordinator: HOST:PORT of process 0; `None`: a free port of this machine.
      devices_per_process: simulated CPU devices; 0: whatever devices the machine has.
      max_restarts: in a row without progress.
      backoff: seconds before the first restart, doubled for each further one without progress.
      grace: seconds the others have to end after one did, before SIGKILL.
    """

    command: list[str]
    workdir: str | None
    local: str | None
    log_dir: pathlib.Path
    processes: int
    devices_per_process: int
    nodes: int
    node_rank: int
    coordinator: str | None
    max_restarts: int
    backoff: float
    grace: float
    signals: int = 0

    def run(self) -> int:
        """The exit code."""
        say(f"output of each process: {self.log_dir}/attempt-N/process-P.log")
        restarts, reached = 0, newest_step(self.workdir, self.local)
        self._hear_signals()
        while True:
            code = outcome(self._attempt())
            if self.signals or code != AGAIN:
                return code
            step = newest_step(self.workdir, self.local)
            restarts = 1 if step > reached else restarts + 1
            reached = max(step, reached)
            reached_text = f"last checkpoint: {f'step {reached}' if reached >= 0 else 'none'}"
            if restarts > self.max_restarts:
                say(f"{reached_text}; {self.max_restarts} restarts without a newer one, giving up")
                return 1
            pause = min(self.backoff * 2 ** (restarts - 1), LONGEST_PAUSE)
            say(
                f"{reached_text}; restarting all in {pause:g} s "
                f"(restart {restarts} of {self.max_restarts} without a newer one)"
            )
            if self._interrupted(pause):
                return AGAIN

    def _attempt(self) -> list[int]:
        """Runs all processes once. The exit codes that tell why it ended: those of the processes
        that failed first, or zeros.
        """
        earlier = last_attempt(self.log_dir)
        folder = self.log_dir / f"attempt-{1 + earlier}"
        folder.mkdir(parents=True)
        address = self.coordinator or f"127.0.0.1:{free_port()}"
        children = [self._start(index, address, folder, earlier) for index in range(self.processes)]
        first_failures: list[int] = []
        deadline, asked = None, False
        while True:
            codes = [child.process.poll() for child in children]
            for child in children:
                child.show_output()
            if not first_failures and any(codes):
                first_failures = [code for code in codes if code]
                say("; ".join(f"process {i} {how(c)}" for i, c in enumerate(codes) if c))
            if None not in codes:
                break
            now = time.monotonic()
            if deadline is None and codes.count(None) < len(codes):
                deadline = now + self.grace
            if not asked and (self.signals or first_failures):
                asked = True
                if not first_failures:
                    say("asked to stop; waiting for the processes to save")
                for child in children:
                    child.send(signal.SIGTERM)
            if self.signals > 1 or (deadline and now > deadline):
                for child in children:
                    child.kill()
            time.sleep(POLL)
        for child in children:
            child.kill()  # What a process started and left behind.
            child.close()
        return first_failures or codes

    def _start(self, index: int, address: str, folder: pathlib.Path, restarts: int) -> "Child":
        environment = os.environ | {"PYTHONUNBUFFERED": "1", "VIT_JAX_RESTARTS": str(restarts)}
        # Large pages: see docs/performance.md.
        environment.setdefault("GLIBC_TUNABLES", "glibc.malloc.hugetlb=1")
        number = self.node_rank * self.processes + index
        if self.nodes * self.processes > 1:
            environment |= {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(self.nodes * self.processes),
                "JAX_PROCESS_ID": str(number),
                "LOCAL_RANK": str(index),  # They share this machine's GPUs and cores.
                "LOCAL_WORLD_SIZE": str(self.processes),
            }
        if self.devices_per_process:
            count = "--xla_force_host_platform_device_count"
            others = re.sub(rf"{count}=\d+", "", environment.get("XLA_FLAGS", ""))
            environment["XLA_FLAGS"] = f"{others} {count}={self.devices_per_process}".strip()
            environment["JAX_PLATFORMS"] = "cpu"
        return Child(number, self.command, environment, folder / f"process-{number}.log")

    def _hear_signals(self) -> None:
        def hear(*_):
            self.signals += 1

        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signal.getsignal(number) is not signal.SIG_IGN:  # As nohup has it.
                signal.signal(number, hear)

    def _interrupted(self, seconds: float) -> bool:
        """Waits; whether a signal came."""
        deadline = time.monotonic() + seconds
        while not self.signals and time.monotonic() < deadline:
            time.sleep(POLL)
        return self.signals > 0


class Child:
    """One process. It writes into a file, which is shown as it grows: nothing waits for a reader,
    and nothing is lost with one.
    """

    def __init__(self, index: int, command: list[str], environment: dict, log: pathlib.Path):
        self._prefix = f"[{index}] ".encode()
        self._rest = b""
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                # A group of its own: Ctrl-C reaches it through us alone, and SIGKILL all of it.
                process_group=0,
                preexec_fn=_die_with(os.getpid()),
            )
        self._log = log.open("rb")

    def send(self, number: signal.Signals) -> None:
        """To the process alone: what it started must continue until it has saved."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """The process and all it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def show_output(self) -> None:
        """Prints whole lines that are new, each with the number of the process."""
        *lines, self._rest = (self._rest + self._log.read()).split(b"\n")
        for line in lines:
            named = line.startswith(self._prefix)  # Log lines of a run with several processes are.
            show(line if named else self._prefix + line)

    def close(self) -> None:
        """Shows what is left."""
        self._rest += b"\n" * bool(self._rest)
        self.show_output()
        self._log.close()


def outcome(codes: list[int]) -> int:
    """What exit codes of processes mean for the run: 0, 1, 2 or 42.

    A process that was killed while another reports an error may be the cause of it: start again.
    """
    if not any(codes):
        return 0
    return codes[0] if all(code in HOPELESS for code in codes) else AGAIN


def how(code: int) -> str:
    """How a process ended, in words."""
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"


def newest_step(workdir: str | None, local: str | None = None) -> int:
    """The step of the newest whole checkpoint in a run's workdir, or of its newest on this machine's
    disks in `local`; -1 where there is none.
    """
    if workdir is None:
        return -1
    if "://" in workdir:
        command = [sys.executable, "-c", IN_BUCKET, f"{workdir}/checkpoints"]
        names = subprocess.run(command, stdout=subprocess.PIPE, text=True).stdout.split()
    else:
        workdir = str(expanded(workdir).absolute())
        folder = pathlib.Path(workdir) / "checkpoints"
        names = [entry.name for entry in folder.iterdir()] if folder.is_dir() else []
    if local:  # SESSION.PROCESS.STEP, see vit_jax/checkpoints/tiers.py
        run = hashlib.sha256(workdir.encode()).hexdigest()[:12]
        files = expanded(local).glob(f"vit_jax-{run}/*")
        names += [file.name.rpartition(".")[2] for file in files]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def expanded(path: str) -> pathlib.Path:
    """A local path with `~` expanded, as by `places.expanded` of vit_jax, which this file does not import.

    Raises:
      SystemExit: the user's home folder is not known; with 2, after a sentence.
    """
    try:
        return pathlib.Path(path).expanduser()
    except RuntimeError:
        say(
            f"{path}: the home folder is not known, for HOME is not set and this user has no entry in the system's "
            "list: set HOME, or an absolute path"
        )
        raise SystemExit(2) from None


def last_attempt(log_dir: pathlib.Path) -> int:
    """The number of the last attempt that is filed there; 0 where there is none."""
    return max((int(p.name.split("-")[1]) for p in log_dir.glob("attempt-*")), default=0)


def workdir_of(command: list[str]) -> str | None:
    """The value of --workdir in a command of vit_jax."""
    return value_of(command, "--workdir")


def value_of(command: list[str], flag: str) -> str | None:
    """The value of a flag in a command of vit_jax."""
    for position, argument in enumerate(command):
        if argument.startswith(f"{flag}="):
            return argument.partition("=")[2]
        if argument == flag and position + 1 < len(command):
            return command[position + 1]
    return None


def free_port() -> int:
    """A TCP port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def say(message: str) -> None:
    show(f"[local] {time.strftime('%H:%M:%S')} {message}".encode())


def show(line: bytes) -> None:
    """Prints a line, if there is still somebody to read it: a closed terminal must not end a run."""
    with contextlib.suppress(OSError):
        sys.stdout.buffer.write(line + b"\n")
        sys.stdout.buffer.flush()


def _die_with(parent: int):
    """What a child does before it starts: on Linux it asks to be killed when we are, however we
    end.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)

    def prepare() -> None:
        libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        if os.getppid() != parent:
            os._exit(AGAIN)

    return prepare


if __name__ == "__main__":
    sys.exit(main())
