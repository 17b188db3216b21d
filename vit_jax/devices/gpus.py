"""Which GPUs of its node a process uses, and how much of their memory. Read from environment
variables and device files; no device is touched here.

`jax.distributed.initialize` would give each process that SLURM or Open MPI starts one GPU, also where
it is the only process of a node with eight.
"""

import dataclasses
import pathlib
import re
from collections.abc import Mapping, MutableMapping

from jax._src import hardware_utils  # has no public name

from vit_jax.base.errors import ConfigError

MEMORY_SHARE = 0.9  # of a GPU's, for the programs of XLA
_VISIBLE = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES")
# By which users choose how XLA allocates memory of GPUs.
_ALLOCATION = (
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
    "XLA_PYTHON_CLIENT_ALLOCATOR",
)
# The kernels that give the same bits every time, and of those always the same: autotuning takes what is the fastest at
# the time of a start.
_DETERMINISTIC = ("--xla_gpu_deterministic_ops=true", "--xla_gpu_autotune_level=0")
_GPU = re.compile(r"\d+|(GPU|MIG)-.+")


@dataclasses.dataclass(frozen=True)
class NodeRank:
    """A process among the processes of its node.

    Attributes:
      index: from 0.
      count: of processes on this node.
    """

    index: int
    count: int


def wanted(environment: Mapping[str, str]) -> bool:
    """Whether JAX may compute with GPUs: not with JAX_PLATFORMS=cpu."""
    platforms = environment.get("JAX_PLATFORMS")
    return not platforms or not {"cuda", "rocm", "gpu"}.isdisjoint(platforms.split(","))


def reserve_memory(environment: MutableMapping[str, str]) -> None:
    """Lets XLA use nine tenths of each GPU's memory instead of its default, three quarters, unless a
    variable for that is set. The rest is for CUDA, cuDNN and NCCL; NVIDIA advises 0.8 or 0.9. Call it
    before JAX looks for devices.
    """
    if not any(name in environment for name in _ALLOCATION):
        environment["XLA_CLIENT_MEM_FRACTION"] = str(MEMORY_SHARE)


def make_deterministic(environment: MutableMapping[str, str], *, too_late: bool) -> None:
    """Has XLA take only kernels that give the same bits every time, see `config.deterministic`.

    Args:
      environment: variables of the process.
      too_late: whether JAX has read them already, as it does when it first uses a device.

    Raises:
      ConfigError: they cannot be set any more, or XLA_FLAGS say otherwise.
    """
    flags = environment.get("XLA_FLAGS", "").split()
    missing = [flag for flag in _DETERMINISTIC if flag not in flags]
    names = [flag.partition("=")[0] for flag in missing]
    contrary = [flag for flag in flags if flag.partition("=")[0] in names]
    if contrary:
        raise ConfigError(
            f"config.deterministic=True, but XLA_FLAGS have {' '.join(contrary)}: remove that, or set "
            "config.deterministic=False"
        )
    if missing and too_late:
        raise ConfigError(
            "config.deterministic=True must be known before JAX uses a device, and this process has used one: start it "
            f"with XLA_FLAGS='{' '.join([*flags, *missing])}'"
        )
    environment["XLA_FLAGS"] = " ".join([*flags, *missing])


def is_deterministic(environment: Mapping[str, str]) -> bool:
    """Whether `make_deterministic` or the user has set this for XLA."""
    return _DETERMINISTIC[0] in environment.get("XLA_FLAGS", "").split()


def on_node() -> int:
    """How many GPUs the node has, or those that its container shows."""
    nvidia = [p for p in pathlib.Path("/dev").glob("nvidia*") if p.name[6:].isdigit()]
    return len(nvidia) or max(hardware_utils.num_available_amd_gpus(), 0)


def allocated(environment: Mapping[str, str], node_gpus: int) -> int:
    """How many GPUs of its node a job may use: fewer than there are if SLURM shares nodes."""
    return int(environment.get("SLURM_GPUS_ON_NODE") or node_gpus)


def visible(environment: Mapping[str, str]) -> list[str] | None:
    """The GPUs that the environment shows to a process; `None` if it does not restrict them."""
    name = next((name for name in _VISIBLE if name in environment), None)
    if name is None:
        return None
    shown = []
    for gpu in environment[name].split(","):
        if not _GPU.fullmatch(gpu.strip()):  # As CUDA does: the first invalid one ends the list.
            break
        shown.append(gpu.strip())
    return shown


def local_device_ids(
    rank: NodeRank | None, environment: Mapping[str, str], node_gpus: int
) -> list[int] | None:
    """The GPUs that a process uses, counted among those that are visible to it.

    1. JAX_LOCAL_DEVICE_IDS, if it is set;
    2. all, if the process is alone on its node, if the engine shows each process GPUs of its own, or
       if it computes on CPUs;
    3. else an equal share of the node's.

    Args:
      rank: among the processes of its node; `None` if the engine does not say.
      environment: variables of the process.
      node_gpus: how many GPUs the node has, see `on_node`; 0 if unknown.

    Returns:
      Ids for `jax.distributed.initialize`; `None` for all.

    Raises:
      ConfigError: more processes than GPUs on a node.
    """
    chosen = environment.get("JAX_LOCAL_DEVICE_IDS")
    if chosen:
        if not re.fullmatch(r"\d+(,\d+)*", chosen):
            raise ConfigError(f"JAX_LOCAL_DEVICE_IDS={chosen} must be numbers, e.g. 0,1")
        return [int(device) for device in chosen.split(",")]
    if rank is None or rank.count == 1 or not wanted(environment):
        return None
    node_gpus = allocated(environment, node_gpus)
    shown = visible(environment)
    if shown is None:
        shared = node_gpus
        if not shared:  # None, or none that can be counted: one for each process, as JAX does.
            return [rank.index]
    else:
        shared = len(shown)
        own = shared * rank.count <= node_gpus if node_gpus else shared < rank.count
        if own or not shared:
            return None
    if shared < rank.count:
        raise ConfigError(
            f"{rank.count} processes on this node share {shared} GPUs: start at most one process for "
            "each GPU"
        )
    share = shared // rank.count
    return list(range(rank.index * share, (rank.index + 1) * share))


def describe_use(node: str, used: int, environment: Mapping[str, str], node_gpus: int) -> dict:
    """What `find_unused` needs to know from each process.

    Args:
      node: its name.
      used: GPUs that the process computes with.
      environment: variables of the process.
      node_gpus: see `on_node`.
    """
    slurm = "SLURM_GPUS_ON_NODE" in environment
    shown = visible(environment)
    available = allocated(environment, 0 if shown is not None else node_gpus)
    return {
        "node": node,
        "used": used,
        "available": available,
        "shown": [] if slurm else shown or [],
    }


def find_unused(uses: list[dict]) -> dict[str, tuple[int, int]]:
    """Nodes on which GPUs stay unused: how many are used, and how many the run may use.

    Args:
      uses: of all processes, from `describe_use`.
    """
    nodes = {}
    for use in uses:
        node = nodes.setdefault(use["node"], {"used": 0, "available": 0, "shown": set()})
        node["used"] += use["used"]
        node["available"] = max(node["available"], use["available"])
        node["shown"] |= set(use["shown"])
    counts = {
        name: (node["used"], max(node["available"], len(node["shown"])))
        for name, node in nodes.items()
    }
    return {name: (used, most) for name, (used, most) in counts.items() if used < most}
