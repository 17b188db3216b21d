"""A Ray cluster, by Ray Train: pip install 'ray[train]'.

Each worker runs one process of vit_jax; without --address, on this machine. When a worker or its node
is lost, Ray starts all again, here or on other nodes, and the run continues from its last checkpoint.
SIGTERM and SIGINT are passed on: the processes save, and nothing is started again. vit_jax must be
installed on the nodes (pip install, or an image); the folder in which you call this, with your
configs, is sent to them, unless `ray job submit --working-dir=.` did that already.

Exit codes: 0 done; 1 error, or too many restarts; 2 the command line or the config is wrong; 42 stopped
by a signal after saving, start me again.
"""

import sys
from types import SimpleNamespace

from launch import checking, flags
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips

FLAGS = (
    "address", "nodes", "gpus_per_node", "processes_per_node", "cpus_per_process", "topology", "slices", "storage",
    "env", "max_restarts",
)  # fmt: skip
NEEDED = ("nodes",)
DEFAULTS: dict[str, object] = {}
PROGRAM = ""
ACTIONS = {"start": True}

CHIPS_OF_HOST = 4


def check(action: str, options: SimpleNamespace) -> checking.Site:
    flags.variables(options.env)
    scaling_of(options)
    remote = bool(options.address)
    if options.topology:
        return checking.Site(options.topology, options.slices, remote=remote, shared_disk=True)
    gpus = options.nodes * options.gpus_per_node
    # Without GPUs each process has one device.
    count = gpus or options.nodes * flags.processes_of_node(options)
    return checking.Site(f"cpu:{count}", gpus=gpus, remote=remote, shared_disk=True)


def scaling_of(options: SimpleNamespace) -> dict:
    """Arguments of `ray.train.ScalingConfig`.

    Raises:
      ConfigError: numbers do not fit each other, or the topology is wrong.
    """
    resources = {"CPU": options.cpus_per_process}
    if options.topology:
        return _tpu_scaling(options, resources)
    if options.slices != 1:
        raise ConfigError(f"--slices={options.slices}: is for TPUs; set --topology=KIND:SHAPE")
    gpus, processes = options.gpus_per_node, flags.processes_of_node(options)
    scaling = {"num_workers": options.nodes * processes, "resources_per_worker": resources}
    if gpus:
        resources["GPU"] = gpus // processes
        scaling["use_gpu"] = True
    return scaling


def _tpu_scaling(options: SimpleNamespace, resources: dict) -> dict:
    """One worker on each host of all slices."""
    if options.gpus_per_node:
        raise ConfigError("--topology is for TPUs and --gpus_per_node for GPUs: set one of them")
    tpu, shape = chips.check_slice(options.topology)
    count = chips.count_chips(shape)
    hosts = options.slices * max(1, count // CHIPS_OF_HOST)
    if options.nodes not in (1, hosts):
        raise ConfigError(
            f"--nodes={options.nodes}: --slices={options.slices} of --topology={options.topology} have {hosts} hosts; "
            "leave --nodes out"
        )
    resources["TPU"] = min(CHIPS_OF_HOST, count)
    return {
        "num_workers": hosts,
        "resources_per_worker": resources,
        "use_tpu": True,
        "topology": shape,
        "accelerator_type": f"TPU-{(tpu.vm or 'v7x').upper()}",
    }


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    checking.require_checked(checked.unchecked, options)
    scaling = scaling_of(options)
    storage = places.absolute(options.storage, "--storage")
    if options.dry_run:
        print(
            f"# ray.train.ScalingConfig(**{scaling}), each worker:\npython -m vit_jax {' '.join(command)}"
        )
        return
    try:
        from launch import ray_train
    except ImportError as error:
        raise ConfigError(f"{error}: pip install 'ray[train]'") from error
    wanted = ray_train.Wanted(
        command=command,
        address=options.address or None,
        scaling=scaling,
        slices=options.slices,
        environment=flags.variables(options.env),
        max_restarts=options.max_restarts,
        storage=storage or None,
    )
    ray_train.connect(wanted)
    sys.exit(ray_train.run(wanted))
