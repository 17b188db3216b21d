"""Runs vit_jax on a Ray cluster, by Ray Train: pip install 'ray[train]'.

  python launch/ray.py --address=auto --num_workers=4 --gpus_per_worker=8 -- \
      train --config=configs/vit_s16_i1k.py --workdir=gs://BUCKET/s16

Each worker runs one process of vit_jax; without --address, on this machine. When a worker or its node
is lost, Ray starts all again, here or on other nodes, and the run goes on from its last checkpoint.
SIGTERM and SIGINT are passed on: the processes save, and nothing is started again. The nodes need
what vit_jax needs (pip install -e . or an image); this checkout itself is sent to them, unless `ray
job submit --working-dir=.` did that already.

Exit codes: 0 done; 1 error, or too many restarts; 2 the command line or the config is wrong; 42 stopped
by a signal after saving, start me again.
"""

import argparse
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time

HERE = pathlib.Path(__file__).resolve().parent
if __name__ == "__main__":
    sys.path.remove(str(HERE))  # It has this file, which is called as the package is.
sys.path.insert(0, str(HERE.parent))

try:
    import ray
    import ray.train
    from ray.train.backend import Backend
    from ray.train.v2.jax import JaxConfig, JaxTrainer
    from ray.util.tpu import get_tpu_coordinator_env_vars

    from launch import local
    from vit_jax.base.errors import ConfigError
    from vit_jax.devices import chips
except ImportError as error:
    print(f"ray.py: {error}: pip install 'ray[train]'", file=sys.stderr)
    sys.exit(2)

CHIPS_OF_HOST = 4
LEAST = {"num_workers": 1, "cpus_per_worker": 1, "gpus_per_worker": 0, "max_restarts": 0}
POLL = 0.5
NOT_SENT = [".git", ".venv", "runs", "tests", "docs", "**/__pycache__"]


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
        scaling, slices = scaling_config(options)
        environment = variables(options.env)
    except (ConfigError, ValueError) as error:
        parser.error(str(error))
    workdir = local.workdir_of(options.command)
    if workdir and "://" not in workdir and not pathlib.Path(workdir).expanduser().is_absolute():
        parser.error(f"--workdir={workdir}: must be absolute or in a bucket; workers run elsewhere")
    connect(options.address, options.num_workers * options.cpus_per_worker)
    sys.exit(run(options, scaling, slices, environment))


def scaling_config(options: argparse.Namespace) -> tuple[ray.train.ScalingConfig, int]:
    """What Ray has to find for the workers, and how many TPU slices these are.

    Raises:
      ConfigError, ValueError: a number or the topology is wrong.
    """
    for name, least in LEAST.items():
        if getattr(options, name) < least:
            raise ConfigError(f"--{name}={getattr(options, name)}: must be {least} or more")
    resources = {"CPU": options.cpus_per_worker}
    if not options.topology:
        if options.gpus_per_worker:
            resources["GPU"] = options.gpus_per_worker
        return ray.train.ScalingConfig(
            num_workers=options.num_workers,
            use_gpu=options.gpus_per_worker > 0,
            resources_per_worker=resources,
        ), 1
    tpu, shape = chips.check_slice(options.topology)
    hosts = max(1, chips.count(shape) // CHIPS_OF_HOST)
    if options.num_workers % hosts:
        raise ConfigError(
            f"--num_workers={options.num_workers}: must be a multiple of {hosts}, the hosts of a slice "
            f"of --topology={options.topology}"
        )
    return ray.train.ScalingConfig(
        num_workers=options.num_workers,
        use_tpu=True,
        topology=shape,
        accelerator_type=f"TPU-{(tpu.vm or 'v7x').upper()}",
        resources_per_worker=resources | {"TPU": min(CHIPS_OF_HOST, chips.count(shape))},
    ), options.num_workers // hosts


def variables(assignments: list[str]) -> dict[str, str]:
    """['NAME=VALUE'] as a dict."""
    for assignment in assignments:
        if not assignment.partition("=")[0].isidentifier() or "=" not in assignment:
            raise ConfigError(f"--env={assignment}: must be NAME=VALUE")
    return dict(assignment.split("=", 1) for assignment in assignments)


def connect(address: str | None, cpus: int) -> None:
    """Joins the cluster, or starts Ray on this machine."""
    # Processes find relative paths in the checkout, not in a folder of Ray's.
    os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
    sent = {"working_dir": str(HERE.parent), "excludes": NOT_SENT}
    runtime = {} if "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ else sent
    if address:
        ray.init(address=address, runtime_env=runtime)
    else:
        ray.init(num_cpus=cpus, include_dashboard=False, runtime_env=runtime)


def run(options, scaling: ray.train.ScalingConfig, slices: int, environment: dict) -> int:
    """The exit code."""
    stop = Stop.options(num_cpus=0).remote()
    storage = options.storage and str(pathlib.Path(options.storage).expanduser())
    trainer = JaxTrainer(
        run_worker,
        train_loop_config={"command": options.command, "stop": stop},
        jax_config=Processes(slices=slices, here=not options.address),
        scaling_config=scaling,
        run_config=ray.train.RunConfig(
            storage_path=storage,
            failure_config=ray.train.FailureConfig(max_failures=options.max_restarts),
            worker_runtime_env={"env_vars": environment},
            # Without its dashboard, Ray warns each second that it cannot ask it.
            logging_config=ray.train.LoggingConfig("INFO" if options.address else "ERROR"),
        ),
    )
    codes = []

    def fit() -> None:
        try:
            codes.append(trainer.fit().return_value)
        except ray.train.TrainingFailedError as error:
            print(
                f"ray.py: {error}: giving up (--max_restarts={options.max_restarts})",
                file=sys.stderr,
            )
            codes.append(1)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.request.remote())
    # In the main thread Ray would catch SIGINT and kill the workers, before they have saved.
    thread = threading.Thread(target=fit, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL)
    return local.outcome(codes) if codes else 1


@ray.remote
class Stop:
    """Whether the run was asked to stop."""

    def __init__(self):
        self._requested = False

    def request(self) -> None:
        self._requested = True

    def requested(self) -> bool:
        return self._requested


@dataclasses.dataclass
class Processes(JaxConfig):
    """Tells each process its place. Ray's own would join the processes in the workers, and only on
    TPUs and GPUs; here vit_jax does that, in processes of its own.
    """

    slices: int = 1
    here: bool = False  # all on this machine

    @property
    def backend_cls(self) -> type[Backend]:
        return ProcessBackend


class ProcessBackend(Backend):
    def on_start(self, worker_group, backend_config: Processes) -> None:
        """Sets the variables that `vit_jax.devices.engines` reads, in each worker."""
        host = "127.0.0.1" if backend_config.here else ""
        address, slices = worker_group.execute_single(0, free_address, host), backend_config.slices
        count, started = len(worker_group), []
        for rank in range(count):
            environment = {
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count),
                "JAX_PROCESS_ID": str(rank),
            }
            if slices > 1:
                first, slice_id = address.rpartition(":")[0], rank // (count // slices)
                environment |= get_tpu_coordinator_env_vars(first, slices, slice_id)
            started.append(worker_group.execute_single_async(rank, set_variables, environment))
        ray.get(started)


def free_address(host: str) -> str:
    """Where this worker can listen: on a host, or on its node's address for ''."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return f"{host or ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"


def set_variables(environment: dict[str, str]) -> None:
    """Sets them; those of an earlier group of slices would have this one wait forever."""
    for name in [name for name in os.environ if name.startswith("MEGASCALE_")]:
        del os.environ[name]
    os.environ.update(environment)


def run_worker(config: dict) -> int:
    """Runs vit_jax in a worker of Ray; its exit code, if starting again would not help.

    Raises:
      RuntimeError: it ended too early: Ray starts all workers again.
    """
    rank, asked = ray.train.get_context().get_world_rank(), False
    log = pathlib.Path(tempfile.mkdtemp(prefix="vit_jax-")) / f"process-{rank}.log"
    command = [sys.executable, "-m", "vit_jax", *config["command"]]
    child = local.Child(rank, command, os.environ | {"PYTHONUNBUFFERED": "1"}, log)
    try:
        while (code := child.process.poll()) is None:
            child.show_output()
            if not asked and ray.get(config["stop"].requested.remote()):
                asked = True
                child.send(signal.SIGTERM)
            time.sleep(POLL)
    finally:
        child.kill()
        child.close()
    if code and code not in local.HOPELESS and not asked:
        raise RuntimeError(f"vit_jax[{rank}] {local.how(code)}")
    return code


if __name__ == "__main__":
    main()
