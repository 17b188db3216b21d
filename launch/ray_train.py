"""What `vit_jax launch ray` runs on a Ray cluster: Ray Train's trainer for JAX, and in each of its workers one
process of vit_jax.
"""

import dataclasses
import os
import pathlib
import signal
import socket
import sys
import tempfile
import threading
import time

import ray
import ray.train
from ray.train.backend import Backend
from ray.train.v2.jax import JaxConfig, JaxTrainer
from ray.util.tpu import get_tpu_coordinator_env_vars

from launch import local

POLL = 0.5
NOT_SENT = [".git", ".venv", "runs", "tests", "docs", "**/__pycache__"]


@dataclasses.dataclass
class Wanted:
    """What the flags of the engine ask for.

    Attributes:
      command: of vit_jax.
      address: of the cluster; `None`: Ray on this machine.
      scaling: of `ray.train.ScalingConfig`.
      slices: of TPUs.
      environment: variables for the processes.
      max_restarts: of all workers.
      storage: where Ray keeps its notes; `None`: where it likes.
    """

    command: list[str]
    address: str | None
    scaling: dict
    slices: int
    environment: dict[str, str]
    max_restarts: int
    storage: str | None


def connect(wanted: Wanted) -> None:
    """Joins the cluster, or starts Ray on this machine."""
    for module in (local, sys.modules[__name__]):  # Workers may not have this folder.
        ray.cloudpickle.register_pickle_by_value(module)
    os.environ["RAY_CHDIR_TO_TRIAL_DIR"] = "0"  # There, relative paths would lead nowhere.
    if not wanted.address:
        cpus = wanted.scaling["num_workers"] * wanted.scaling["resources_per_worker"]["CPU"]
        # Without its dashboard, Ray Train warns each second that it cannot ask it.
        quiet = ray.LoggingConfig(log_level="ERROR")
        ray.init(num_cpus=cpus, include_dashboard=False, logging_config=quiet)
    elif "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ:
        ray.init(address=wanted.address)
    else:
        ray.init(
            address=wanted.address, runtime_env={"working_dir": os.getcwd(), "excludes": NOT_SENT}
        )


def run(wanted: Wanted) -> int:
    """Trains; the exit code.

    Raises:
      ValueError: Ray finds no sense in the scaling.
    """
    stop = Stop.options(num_cpus=0).remote()
    trainer = JaxTrainer(
        run_worker,
        train_loop_config={
            "command": wanted.command,
            "stop": stop,
            "folder": None if wanted.address else os.getcwd(),
        },
        jax_config=Processes(slices=wanted.slices, here=not wanted.address),
        scaling_config=ray.train.ScalingConfig(**wanted.scaling),
        run_config=ray.train.RunConfig(
            storage_path=wanted.storage,
            failure_config=ray.train.FailureConfig(max_failures=wanted.max_restarts),
            worker_runtime_env={"env_vars": wanted.environment},
            logging_config=ray.train.LoggingConfig("INFO" if wanted.address else "ERROR"),
        ),
    )
    codes = []

    def fit() -> None:
        try:
            code, last_lines = trainer.fit().return_value
            codes.append(code)
            if code:  # Ray shows what workers print a little later, perhaps too late.
                print(last_lines, file=sys.stderr)
        except ray.train.TrainingFailedError as error:
            print(
                f"vit_jax launch: {error}: giving up (--max_restarts={wanted.max_restarts})",
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
    return local.outcome(codes) if codes else 1  # Its traceback is printed.


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


def run_worker(config: dict) -> tuple[int, str]:
    """Runs vit_jax in a worker of Ray; its exit code, if starting again would not help, and the last
    lines that it wrote.

    Raises:
      RuntimeError: it ended too early: Ray starts all workers again.
    """
    context, asked = ray.train.get_context(), False
    rank = context.get_world_rank()
    if config["folder"]:
        os.chdir(config["folder"])
    log = pathlib.Path(tempfile.mkdtemp(prefix="vit_jax-")) / f"process-{rank}.log"
    command = [sys.executable, "-m", "vit_jax", *config["command"]]
    environment = os.environ | {
        "PYTHONUNBUFFERED": "1",
        "LOCAL_RANK": str(context.get_local_rank()),
        "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
    }
    child = local.Child(rank, command, environment, log)
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
    return code, "\n".join(log.read_text(errors="replace").splitlines()[-20:])
