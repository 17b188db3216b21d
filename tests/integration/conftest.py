"""A run so small that it takes seconds, as a config and as a command line."""

import os
import subprocess
import sys

import pytest

from vit_jax.config import load_config

TINY = {
    "model.name": "ViT-mu/8",
    "model.width": 32,
    "model.depth": 2,
    "model.heads": 2,
    "model.mlp_dim": 64,
    "batch_size": 32,
    "duration": "12 steps",
    "log.every": "4 steps",
    "checkpoint.every": "4 steps",
    "data.threads": 2,
}


@pytest.fixture(scope="session")
def compilation_cache(tmp_path_factory) -> str:
    """One for all runs of a test process: the same tiny programs again and again."""
    return str(tmp_path_factory.mktemp("xla"))


@pytest.fixture
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
    """`cli(command, *arguments, **options of Popen)`: a real vit_jax process on one CPU device."""

    def start(*arguments, tiny: bool = False, **options) -> subprocess.Popen:
        environment = (
            os.environ | {"XLA_FLAGS": "", "JAX_PLATFORMS": "cpu"} | options.pop("env", {})
        )
        overrides = [f"--config.{name}={value}" for name, value in TINY.items()] if tiny else []
        overrides += [f"--config.compilation_cache={compilation_cache}"] if tiny else []
        command = [
            sys.executable,
            "-m",
            "vit_jax",
            *map(str, arguments[:1]),
            *overrides,
            *map(str, arguments[1:]),
        ]
        pipe = subprocess.PIPE
        return subprocess.Popen(
            command, stdout=pipe, stderr=pipe, text=True, env=environment, **options
        )

    return start


@pytest.fixture
def run_cli(cli):
    """`run_cli(…)`: the same, waited for: (exit code, standard output, standard error)."""

    def run(*arguments, **options) -> tuple[int, str, str]:
        process = cli(*arguments, **options)
        out, err = process.communicate(timeout=300)
        return process.returncode, out, err

    return run
