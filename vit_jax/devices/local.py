"""What this machine has, found without using its devices, which other programs may have."""

import glob
import os

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
