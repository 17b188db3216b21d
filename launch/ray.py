"""Runs vit_jax on a Ray cluster, by Ray Train: pip install 'ray[train]'.

  python launch/ray.py --address=auto --num_workers=4 --gpus_per_worker=8 -- \
      train --config=configs/vit_s16_i1k.py --workdir=gs://BUCKET/s16

Each worker runs one process of vit_jax; without --address, on this machine. When a worker or its node
is lost, Ray starts all again, here or on other nodes, and the run continues from its last checkpoint.
SIGTERM and SIGINT are passed on: the processes save, and nothing is started again. vit_jax must be
installed on the nodes (pip install, or an image); the folder in which you call this, with your
configs, is sent to them, unless `ray job submit --working-dir=.` did that already.

Exit codes: 0 done; 1 error, or too many restarts; 2 the command line or the config is wrong; 42 stopped
by a signal after saving, start me again.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from launch import local
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips

CHIPS_OF_HOST = 4
LEAST = {"num_workers": 1, "cpus_per_worker": 1, "gpus_per_worker": 0, "max_restarts": 0}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        usage="ray.py [options] -- COMMAND_OF_VIT_JAX …",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--address", help="of the cluster, as ray.init takes it; default: Ray on this machine")
    add("--num_workers", type=int, default=1, help="processes, e.g. one for each node")
    add("--gpus_per_worker", type=int, default=0, help="8: one process uses a node of eight")
    add("--cpus_per_worker", type=int, default=1, help="CPU cores that Ray reserves for a worker")
    add("--topology", help="of TPU slices, e.g. v5e:4x8; --num_workers are the hosts of all slices")
    add("--env", action="append", default=[], help="NAME=VALUE for the processes; may be repeated")
    add(
        "--max_restarts", type=int, default=100, help="of all workers; lost spot nodes do not count"
    )
    add("--storage", help="where Ray keeps its notes, for all nodes; default: ~/ray_results")
    add("command", nargs="+", help="of vit_jax: train --config=FILE --workdir=DIR …")
    options = parser.parse_args()
    try:
        scaling, slices = scaling_of(options)
        environment = variables(options.env)
        if options.address:
            check_workdir(local.workdir_of(options.command))
    except ConfigError as error:
        parser.error(str(error))
    # This file is called as the package is: without its folder, the package is found.
    here = pathlib.Path(__file__).resolve().parent
    sys.path = [path for path in sys.path if pathlib.Path(path or ".").resolve() != here]
    try:
        from launch import ray_train
    except ImportError as error:
        parser.error(f"{error}: pip install 'ray[train]'")
    wanted = ray_train.Wanted(
        command=options.command,
        address=options.address,
        scaling=scaling,
        slices=slices,
        environment=environment,
        max_restarts=options.max_restarts,
        storage=options.storage and str(pathlib.Path(options.storage).expanduser()),
    )
    ray_train.connect(wanted)
    sys.exit(ray_train.run(wanted))


def scaling_of(options: argparse.Namespace) -> tuple[dict, int]:
    """Arguments of `ray.train.ScalingConfig`, and how many TPU slices these are.

    Raises:
      ConfigError: a number or the topology is wrong.
    """
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise ConfigError(f"--{name}={getattr(options, name)}: must be {least} or more")
    resources = {"CPU": options.cpus_per_worker}
    scaling = {"num_workers": options.num_workers, "resources_per_worker": resources}
    if not options.topology:
        if options.gpus_per_worker:
            resources["GPU"] = options.gpus_per_worker
            scaling["use_gpu"] = True
        return scaling, 1
    if options.gpus_per_worker:
        raise ConfigError("--topology is for TPUs and --gpus_per_worker for GPUs: set one of them")
    tpu, shape = chips.check_slice(options.topology)
    hosts = max(1, chips.count_chips(shape) // CHIPS_OF_HOST)
    if options.num_workers % hosts:
        raise ConfigError(
            f"--num_workers={options.num_workers}: must be a multiple of {hosts}, the hosts of a slice "
            f"of --topology={options.topology}"
        )
    resources["TPU"] = min(CHIPS_OF_HOST, chips.count_chips(shape))
    kind = f"TPU-{(tpu.vm or 'v7x').upper()}"
    return scaling | {"use_tpu": True, "topology": shape, "accelerator_type": kind}, (
        options.num_workers // hosts
    )


def variables(assignments: list[str]) -> dict[str, str]:
    """['NAME=VALUE'] as a dict."""
    for assignment in assignments:
        name, equals, _ = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--env={assignment}: must be NAME=VALUE")
    return dict(assignment.split("=", 1) for assignment in assignments)


def check_workdir(workdir: str | None) -> None:
    """That all nodes understand the same by it."""
    if workdir and "://" not in workdir and not pathlib.Path(workdir).expanduser().is_absolute():
        raise ConfigError(
            f"--workdir={workdir}: must be absolute or in a bucket: workers run elsewhere"
        )


if __name__ == "__main__":
    main()
