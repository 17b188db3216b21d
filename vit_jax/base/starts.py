"""Whether this start of a run is its first: an error that passes by itself ends a first start with exit code 2, since a
supervisor would repeat 42 a hundred times, and a restart with 42.
"""

import os


def restarts() -> int | None:
    """How often the supervisor has started this run again; `None` if it does not say."""
    count = os.environ.get("VIT_JAX_RESTARTS") or os.environ.get("SLURM_RESTART_COUNT")
    return int(count) if count else None


def is_restart() -> bool:
    """Whether the run was started before. A pod of Kubernetes that does not say may be any start."""
    count = restarts()
    if count is None:
        return "KUBERNETES_SERVICE_HOST" in os.environ
    return count > 0
