"""What this machine has, found without using its devices, which other programs may have."""

import glob
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

# Files of the drivers of NVIDIA's GPUs and of TPUs.
_ACCELERATORS = ("/dev/nvidia[0-9]*", "/dev/accel*", "/dev/vfio/[0-9]*")


def platform() -> str:
    """'cpu' if a run would use the CPU; '' if it may use something else."""
    import jax

    return _platform(jax.config.jax_platforms or os.environ.get("JAX_PLATFORMS", ""))


def platform_of_children() -> str:
    """`platform` of a process that is started now; this one may have chosen otherwise, and need not have JAX."""
    return _platform(os.environ.get("JAX_PLATFORMS", ""))


def _platform(named: str) -> str:
    if named:
        return "cpu" if named == "cpu" else ""
    return "" if any(glob.glob(pattern) for pattern in _ACCELERATORS) else "cpu"


def memory_bytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0))


def own_cores() -> int:
    """The cores for what this process decodes: its share, where others of its node may use the same ones."""
    from vit_jax.devices import engines

    return engines.share_of_cores(cores(), os.cpu_count() or 1, os.environ)


def device_text(devices: "Sequence[jax.Device]") -> str:
    """'8 GPUs', '1 TPU'; '8 devices' of CPUs."""
    platform = devices[0].platform
    name = "device" if platform == "cpu" else platform.upper()
    return f"{len(devices)} {name}{'s' * (len(devices) > 1)}"


def warn_of_few_cores(cores: int, devices: "Sequence[jax.Device]") -> str:
    """What to say of a process with at most one core for each accelerator, as SLURM gives it where nobody asks
    for more; '' if it has more.
    """
    if devices[0].platform == "cpu" or cores > len(devices):
        return ""
    return (
        f"this process may use {cores} core{'s' * (cores > 1)} for {device_text(devices)}: a core decodes 500 to "
        "1,100 images a second. Give it those of the whole host: launch/slurm/train.sbatch "
        "does, or srun --cpu-bind=none, docker run --cpuset-cpus, taskset"
    )
