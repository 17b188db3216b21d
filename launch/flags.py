"""The flags of `vit_jax launch`: one table for all engines, so that a word means the same in all of them; and checks of
their values.
"""

import dataclasses
import re
from types import SimpleNamespace

from vit_jax.base.errors import ConfigError

MAX_LABEL = 63  # characters of a name in DNS


@dataclasses.dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
      default: its type is that of the flag; of a tuple, it may be repeated.
      help: what it is.
      least: of a number.
    """

    default: str | int | float | bool | tuple
    help: str
    least: int | None = None


FLAGS = {
    "name": Flag("", "of the run on the cluster, e.g. b16"),
    "topology": Flag("", "KIND:SHAPE of a TPU slice, e.g. v5e:8x8: v4, v5e, v5p, v6e or tpu7x"),
    "slices": Flag(1, "TPU slices that train as one run", 1),
    "chips_per_host": Flag(4, "chips of a host, as google.com/tpu of its node pool", 1),
    "nodes": Flag(1, "how many machines", 1),
    "gpus_per_node": Flag(0, "GPUs of each machine that the run uses", 0),
    "processes_per_node": Flag(0, "0: one for each GPU, or one where there are none; 1: one process uses all GPUs of "
                               "its machine", 0),
    "cpus_per_process": Flag(1, "CPU cores that are reserved for a process", 1),
    "gpu": Flag("H100", "kind of GPU, as SkyPilot names it"),
    "cluster": Flag("", "which cluster"),
    "address": Flag("", "of the Ray cluster, as ray.init takes it; default: Ray on this machine"),
    "project": Flag("", "of Google Cloud; default: gcloud's"),
    "zone": Flag("", "of Google Cloud, e.g. europe-west4-b"),
    "image": Flag("", "container made from launch/docker/tpu.Dockerfile; default: Python's own, in which each pod "
                  "installs this version of vit_jax"),
    "extra": Flag("cuda13,gcs", "of vit_jax, installed on the machines"),
    "bucket": Flag("", "of Cloud Storage, whose data can be read in /mnt/BUCKET"),
    "storage": Flag("", "mounted storage by the name that the cluster knows; of Ray, where it keeps its notes"),
    "spot": Flag(False, "cheaper machines, which may be taken away"),
    "reserved": Flag(False, "from a reservation"),
    "queued": Flag(False, "wait in the queue of requests for capacity"),
    "queue": Flag("", "in which the run waits: a LocalQueue of Kueue, a partition of SLURM"),
    "priority": Flag("", "of the run: a PriorityClass of Kubernetes"),
    "service_account": Flag("", "that reads and writes the bucket: of Kubernetes, or of a TPU VM"),
    "network": Flag("", "of a TPU VM"),
    "subnetwork": Flag("", "of a TPU VM"),
    "internal_ips": Flag(False, "TPU VMs without public addresses"),
    "tunnel_through_iap": Flag(False, "reach TPU VMs through Identity-Aware Proxy"),
    "version": Flag("", "software version of a TPU VM; default: the one of its kind"),
    "host_network": Flag(True, "of several slices: the nodes' own network, faster between slices. Pods then act as "
                         "the node pool's service account; --nohost_network keeps Workload Identity"),
    "node_path": Flag("/mnt/stateful_partition/vit_jax", "folder of each node where config.checkpoint.local is kept; "
                      "/dev/shm/vit_jax is in memory"),
    "max_restarts": Flag(100, "how often all is started again, or how often without a newer checkpoint", 0),
    "grace": Flag(120, "seconds to save before SIGKILL", 0),
    "ttl": Flag(7 * 24 * 3600, "seconds after its end until the run's pods and logs are removed", 0),
    "every": Flag(60, "seconds between two looks at the slice; more after failures", 0),
    "max_attempts": Flag(5, "installations that may fail in a row on a slice, which costs", 1),
    "worker": Flag(0, "whose output logs follows", 0),
    "slice": Flag(0, "whose output logs follows", 0),
    "processes": Flag(1, "how many, one for each pretended host", 1),
    "devices_per_process": Flag(0, "simulated CPU devices; 0: real ones", 0),
    "backoff": Flag(1.0, "seconds before a restart; doubles each time", 0),
    "process_logs": Flag("", "folder of the output of each process; default: WORKDIR/logs"),
    "env": Flag((), "NAME=VALUE for the processes; may be repeated"),
    "price_per_chip_hour": Flag(0.0, "to print the cost of the run", 0),
    "unchecked": Flag(False, "start although something could not be checked from here"),
    "dry_run": Flag(False, "check the training command, print what would run, and start nothing"),
}  # fmt: skip
# Of every engine.
COMMON = ("price_per_chip_hour", "unchecked", "dry_run")
# What flags of the earlier scripts are called now.
FORMER = {
    "type": "--topology=KIND:SHAPE, e.g. v5e:8x8",
    "chips": "--chips_per_host=N",
    "num_workers": "--nodes=N and --processes_per_node=N",
    "gpus_per_worker": "--gpus_per_node=N and --processes_per_node=N",
    "cpus_per_worker": "--cpus_per_process=N",
    "gpus-per-node": "--gpus_per_node=N",
    "time": "a flag of sbatch: put it behind the training command, after --",
}


def check_values(options: SimpleNamespace, needed: tuple[str, ...]) -> None:
    """Raises `ConfigError` for numbers that are too small, and for what is missing."""
    for name, value in vars(options).items():
        least = FLAGS[name].least
        if least is not None and not value >= least:
            raise ConfigError(f"--{name}={value}: must be {least} or more")
    for name in needed:
        if not getattr(options, name):
            raise ConfigError(f"--{name}=… is missing: {FLAGS[name].help}")


def processes_of_node(options: SimpleNamespace) -> int:
    """How many processes run on each machine: one for each of its GPUs, if --processes_per_node does not say otherwise.

    Raises:
      ConfigError: they cannot share the GPUs evenly.
    """
    gpus = options.gpus_per_node
    processes = options.processes_per_node or gpus or 1
    if gpus % processes:
        raise ConfigError(
            f"--processes_per_node={processes}: {gpus} GPUs of a node cannot be divided among them evenly"
        )
    return processes


def check_label(flag: str, value: str, longest: int = MAX_LABEL) -> None:
    """Raises `ConfigError` unless a name can be one in DNS that begins with a letter (RFC 1035), as JobSet requires."""
    if not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", value):
        raise ConfigError(
            f"--{flag}={value}: must be lower-case letters, digits and '-', a letter first, e.g. b-16"
        )
    if len(value) > longest:
        raise ConfigError(
            f"--{flag}={value}: has {len(value)} characters, must have {longest} or less"
        )


def check_bucket(value: str) -> None:
    """Raises `ConfigError` unless it is a bucket's name."""
    if value and not re.fullmatch(r"[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]", value):
        raise ConfigError(
            f"--bucket={value}: must be the name of a bucket alone, without gs://, of "
            "lower-case letters, digits, '-', '_' and '.'"
        )


def variables(assignments: list[str]) -> dict[str, str]:
    """The values of --env, ['NAME=VALUE'], as a dict. Raises `ConfigError` for others."""
    for assignment in assignments:
        name, equals, _ = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env={assignment}: must be NAME=VALUE")
    return dict(assignment.split("=", 1) for assignment in assignments)
