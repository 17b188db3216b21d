"""Whether this start of a run is its first: an error that passes by itself ends a first start with exit code 2, since a
supervisor would repeat 42 a hundred times, and a restart with 42.
"""

import os


def is_restart() -> bool:
    """Whether the supervisor has started this run before. A pod of Kubernetes that does not say may be any start."""
    count = os.environ.get("VIT_JAX_RESTARTS") or os.environ.get("SLURM_RESTART_COUNT")
    if not count:
        return "KUBERNETES_SERVICE_HOST" in os.environ
    return int(count) > 0
