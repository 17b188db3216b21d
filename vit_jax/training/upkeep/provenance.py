"""Where a run came from: its command, the commit of the code, the hardware; and how long its process has been
there. For results that are compared by the time they took.
"""

import importlib.metadata
import os
import pathlib
import shlex
import subprocess
import sys
import time

import jax

from vit_jax.devices import local

_PACKAGE = pathlib.Path(__file__).parents[2]
_IMPORTED = time.monotonic()


def describe_process() -> dict[str, str]:
    """`command`, `commit` and `hardware` of this process."""
    return {"command": command(), "commit": commit(), "hardware": hardware()}


def command() -> str:
    """The command line: `vit_jax train …`, or that of a program of the user's."""
    parts = sys.orig_argv  # `sys.argv` lacks what was parsed
    names = [os.path.basename(part) for part in parts]
    if "vit_jax" in names:
        parts = ["vit_jax", *parts[names.index("vit_jax") + 1 :]]
    return shlex.join(parts)


def commit(folder: pathlib.Path = _PACKAGE) -> str:
    """The commit that this package was checked out from, '-dirty' with changes of its files; otherwise its version."""
    try:
        # A folder may lie in a checkout of something else, as a virtual environment does.
        _git(folder, "ls-files", "--error-unmatch", "__init__.py")
        return _git(folder, "describe", "--always", "--dirty", "--exclude=*")
    except (OSError, subprocess.CalledProcessError):
        return f"vit_jax {importlib.metadata.version('vit_jax')}"


def hardware() -> str:
    """'8 x TPU v5 lite', or of CPUs '2 cores of AMD EPYC 9B14'."""
    device = jax.devices()[0]
    if device.platform != "cpu":
        return f"{jax.device_count()} x {device.device_kind}"
    file = pathlib.Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    cores = local.cores()
    return f"{cores} core{'s' if cores > 1 else ''} of {names[0] if names else 'a CPU'}"


def process_seconds() -> float:
    """Since this process was started; where the system has no /proc, since this module was imported."""
    stat = pathlib.Path("/proc/self/stat")
    if not stat.exists():
        return time.monotonic() - _IMPORTED
    started = int(stat.read_text().rpartition(")")[2].split()[19])  # in ticks since the boot
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def _git(folder: pathlib.Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
