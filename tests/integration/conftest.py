"""A run so small that it takes seconds, as a config, as a command line, and as several processes
that stand for hosts.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time

import cv2
import numpy as np
import pytest

from tests.conftest import QUICK
from tests.services.ports import free_port
from tests.waiting import PATIENCE
from vit_jax.recipes.user_files import load_config

# Mixing and audits, which a third of such a run's time would go to, are those of `HOSTS`, of `trained` in
# `test_train.py`, and of their own tests.
TINY = {
    "augment.mixup": 0.0,
    "audit.every": 0,
    "model.name": "ViT-mu/8",
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp_dim": 64,
    "batch_size": 32,
    "duration": "12 steps",
    "log.every": "4 steps",
    "checkpoint.every": "4 steps",
    "log.tensorboard": False,
    "data.threads": 2,
}

HOSTS = TINY | {
    "augment.mixup": 0.2,
    "audit.every": 100,
    "model.depth": 1,
    "log.every": "1 steps",
    "data.threads": 1,
    "data.read_ahead": 0,  # the order of reads is observed
}


def write_image(path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(
        str(path), np.random.default_rng(len(str(path))).integers(0, 255, (20, 30, 3), np.uint8)
    )


@pytest.fixture(scope="session")
def tiny_config(compilation_cache):
    """`tiny_config(**overrides)`: the config of a tiny run on digits; overrides by dotted name,
    dots as double underscores.
    """

    def make(**overrides):
        config = load_config("configs/digits.py")
        config.update_from_flattened_dict(TINY | {"compilation_cache": compilation_cache})
        config.update_from_flattened_dict(
            {name.replace("__", "."): value for name, value in overrides.items()}
        )
        return config

    return make


@pytest.fixture
def cli(compilation_cache):
    """`cli(command, *arguments, **options of Popen)`: a real process on one CPU device, of vit_jax or another module. A
    test that fails leaves none behind.
    """
    started = []

    def start(
        *arguments, tiny: bool = False, module: str = "vit_jax", **options
    ) -> subprocess.Popen:
        environment = (
            os.environ | {"XLA_FLAGS": QUICK, "JAX_PLATFORMS": "cpu"} | options.pop("env", {})
        )
        overrides = [f"--config.{name}={value}" for name, value in TINY.items()] if tiny else []
        overrides += [f"--config.compilation_cache={compilation_cache}"] if tiny else []
        command = [
            sys.executable,
            "-m",
            module,
            *map(str, arguments[:1]),
            *overrides,
            *map(str, arguments[1:]),
        ]
        pipe = subprocess.PIPE
        started.append(
            subprocess.Popen(
                command, stdout=pipe, stderr=pipe, text=True, env=environment, **options
            )
        )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def run_cli(cli):
    """`run_cli(…)`: the same, waited for: (exit code, standard output, standard error)."""

    def run(*arguments, **options) -> tuple[int, str, str]:
        process = cli(*arguments, **options)
        out, err = process.communicate(timeout=PATIENCE)
        return process.returncode, out, err

    return run


class Hosts:
    """A training run of several real processes, each with its own log in FOLDER/I.log; {process} in
    an argument is the process's index.

    Attributes:
      processes: by their index.
      folder: of the logs and of what `observed.py` writes.
    """

    def __init__(self, folder: pathlib.Path, command: list[str], processes: int, devices: int):
        folder.mkdir()
        self.folder = folder
        self._logs = [folder / f"{i}.log" for i in range(processes)]
        port = free_port()
        self.processes = []
        for i, log in enumerate(self._logs):
            environment = os.environ | {
                "JAX_PLATFORMS": "cpu",
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {QUICK}",
            }
            if processes > 1:
                environment |= {
                    "JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}",
                    "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(i),
                }
            with log.open("w") as file:
                own = [argument.replace("{process}", str(i)) for argument in command]
                self.processes.append(
                    subprocess.Popen(own, stdout=file, stderr=file, env=environment)
                )

    def log(self, process: int) -> str:
        return self._logs[process].read_text()

    def codes(self, seconds: float = PATIENCE) -> list[int]:
        """The exit codes, once all have ended."""
        deadline = time.monotonic() + seconds
        return [p.wait(max(deadline - time.monotonic(), 0.1)) for p in self.processes]

    def until(self, condition) -> None:
        """Waits until `condition()` holds, which must be while all processes run."""
        deadline = time.monotonic() + PATIENCE
        while not condition():
            for i, process in enumerate(self.processes):
                assert process.poll() is None, f"process {i} ended too early:\n{self.log(i)}"
            assert time.monotonic() < deadline, f"it did not come so far:\n{self.log(0)}"
            time.sleep(0.03)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def hosts(compilation_cache, tmp_path, monkeypatch):
    """`hosts(workdir, *arguments, processes, devices, config, **observed)` starts a `Hosts` that
    trains; `observed`: see `observed.py`.
    """
    with contextlib.ExitStack() as stack:
        started = []

        def start(
            workdir, *arguments, processes: int = 2, devices: int = 1, config: str = "digits.py", **observed
        ) -> Hosts:  # fmt: skip
            folder = tmp_path / f"hosts{len(started)}"
            said = {"folder": str(folder), **observed}
            monkeypatch.setenv("OBSERVED", json.dumps(said))
            options = HOSTS | {"compilation_cache": compilation_cache}
            command = [
                sys.executable,
                str(pathlib.Path(__file__).with_name("observed.py")),
                "train",
            ]
            command += [f"--config=configs/{config}", f"--workdir={workdir}"]
            command += [f"--config.{name}={value}" for name, value in options.items()]
            run = Hosts(folder, [*command, *arguments], processes, devices)
            started.append(run)
            stack.callback(run.kill)
            return run

        yield start
