"""What started the processes of a run, and what it says in environment variables: who is who, and
which devices each process uses.

SLURM, Open MPI, TPU VMs and GKE are found by JAX's own classes. Ray, SkyPilot, a JobSet without TPUs
and `launch/local.py` set JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID.
"""

import dataclasses
import importlib.util
import os
import re
from collections.abc import Callable, Mapping

from jax._src import clusters

from vit_jax.base.errors import ConfigError
from vit_jax.devices import gpus


@dataclasses.dataclass(frozen=True)
class Place:
    """A process in a run of several.

    Attributes:
      find_coordinator: HOST:PORT of process 0; may wait until that host has a name, at most for so
        many seconds.
      num_processes, process_id: how many there are, and which of them this is.
      local_device_ids: for `jax.distributed.initialize`; `None` for all that are visible.
      where: what the others are part of, for messages.
    """

    find_coordinator: Callable[[int], str]
    num_processes: int
    process_id: int
    local_device_ids: list[int] | None
    where: str


def find_place(
    coordinator: str | None = None, num_processes: int | None = None, process_id: int | None = None
) -> Place | None:
    """Where this process is in its run; `None` if it is alone. See `processes.initialize`.

    Raises:
      ConfigError: only some of the three are given, or they make no sense.
    """
    given = {
        "--coordinator": coordinator or os.environ.get("JAX_COORDINATOR_ADDRESS"),
        "--num_processes": _number("JAX_NUM_PROCESSES", num_processes),
        "--process_id": _number("JAX_PROCESS_ID", process_id),
    }
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(given):
        return _place_in_cluster()
    if missing == ["--num_processes", "--process_id"] and _open_mpi_size() > 1:
        given["--num_processes"] = _open_mpi_size()
        given["--process_id"] = int(os.environ["OMPI_COMM_WORLD_RANK"])
        rank = node_rank("ompi", os.environ)
    elif missing:
        raise ConfigError(f"{' and '.join(missing)} must be set too, with the other of the three")
    else:
        rank = node_rank("given", os.environ)
    address, count, index = given.values()
    if not 0 <= index < count:
        raise ConfigError(
            f"--process_id={index} is not one of --num_processes={count}, which count from 0"
        )
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigError(
            f"--coordinator={address} is not HOST:PORT, the port a number from 1 to 65535"
        )
    return Place(lambda seconds: address, count, index, _devices(rank), address)


def node_rank(engine: str, environment: Mapping[str, str]) -> gpus.NodeRank | None:
    """This process among those that an engine has started on its node; `None` if it does not say.

    Args:
      engine: JAX's name of a cluster, or 'given' for a process that was given its place.
      environment: variables of the process.
    """
    if engine == "slurm":
        counts = _tasks_per_node(
            environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE")
        )
        node = int(environment.get("SLURM_NODEID", 0))
        even = int(environment["SLURM_NTASKS"]) // int(environment.get("SLURM_NNODES", 1))
        count = counts[node] if node < len(counts) else even
        return gpus.NodeRank(int(environment["SLURM_LOCALID"]), count)
    names = {
        "ompi": ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        "given": ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    }.get(engine, ())
    if not names or any(name not in environment for name in names):
        return None
    return gpus.NodeRank(*(int(environment[name]) for name in names))


def share_of_cores(allowed: int, on_node: int, environment: Mapping[str, str]) -> int:
    """The cores that a process computes with, where each process of its node takes an equal share.

    Args:
      allowed: cores that the process may use: all of the node's, or those that the engine has bound it to.
      on_node: cores of the node.
      environment: variables of the process.
    """
    if "LOCAL_WORLD_SIZE" in environment:
        engine = "given"
        shared = allowed  # What sets it binds no process.
    elif "OMPI_COMM_WORLD_LOCAL_SIZE" in environment:
        engine = "ompi"
        shared = on_node
    elif "SLURM_LOCALID" in environment and "SLURM_NTASKS" in environment:
        engine = "slurm"
        shared = int(environment.get("SLURM_CPUS_ON_NODE") or on_node)
    else:
        return allowed
    rank = node_rank(engine, environment)
    if rank is None or rank.count <= 1:
        return allowed
    return min(allowed, max(1, shared // rank.count))


def _place_in_cluster() -> Place | None:
    cluster = _cluster()
    if cluster is None and _open_mpi_size() > 1:
        raise ConfigError(
            f"Open MPI has started {_open_mpi_size()} processes, and this version of it does not say "
            "where the first one is: set --coordinator=HOST:PORT with the host of rank 0"
        )
    if cluster is None or cluster.get_process_count() == 1:
        return None
    return Place(
        find_coordinator=lambda seconds: cluster.get_coordinator_address(
            timeout_secs=seconds,
            override_coordinator_port=os.environ.get("JAX_COORDINATOR_PORT"),
        ),
        num_processes=cluster.get_process_count(),
        process_id=cluster.get_process_id(),
        local_device_ids=_devices(node_rank(cluster.name, os.environ)),
        where=f"the {cluster.name} job",
    )


def _cluster() -> type[clusters.ClusterEnv] | None:
    """The cluster that JAX finds around this process."""
    known = [c for c in clusters.ClusterEnv._cluster_types if not c.opt_in_only_method]
    # Not Kubernetes: JAX would query the job of any pod. TPUs there are found by their own
    # variables; other pods give the three arguments.
    unknown = {"k8s"}
    if "OMPI_MCA_orte_hnp_uri" not in os.environ and not importlib.util.find_spec("mpi4py"):
        unknown.add("ompi")  # JAX 0.12 finds Open MPI 5, and then fails without that package.
    return next((c for c in known if c.name not in unknown and c.is_env_present()), None)


def _devices(rank: gpus.NodeRank | None) -> list[int] | None:
    return gpus.local_device_ids(rank, os.environ, gpus.on_node())


def _open_mpi_size() -> int:
    return int(os.environ.get("OMPI_COMM_WORLD_SIZE", 1))


def _tasks_per_node(text: str | None) -> list[int]:
    """SLURM's '2(x3),1' as [2, 2, 2, 1]."""
    counts = []
    for count, repeat in re.findall(r"(\d+)(?:\(x(\d+)\))?", text or ""):
        counts += [int(count)] * int(repeat or 1)
    return counts


def _number(variable: str, given: int | None) -> int | None:
    if given is not None or variable not in os.environ:
        return given
    if not os.environ[variable].isdigit():
        raise ConfigError(f"{variable}={os.environ[variable]} is not a number")
    return int(os.environ[variable])
