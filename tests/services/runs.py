"""A finished run for all tests that read one, trained once in each process of the tests."""

import pathlib
from typing import Any, NamedTuple

import pytest


class FinishedRun(NamedTuple):
    """A run's folder, which nobody changes (copy it), what it ended with, and its config."""

    workdir: pathlib.Path
    result: dict[str, Any]
    config: Any


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory, compilation_cache) -> FinishedRun:
    """A tiny run of 12 steps on digits with checkpoints 4, 8 and 12, mixed, audited and logged as in the recipe."""
    import vit_jax
    from tests.integration.conftest import TINY

    config = vit_jax.load_config("configs/digits.py")
    as_in_recipe = ("augment.mixup", "audit.every", "log.tensorboard")
    config.update_from_flattened_dict(
        {name: TINY[name] for name in TINY if name not in as_in_recipe}
    )
    config.compilation_cache = compilation_cache
    workdir = tmp_path_factory.mktemp("finished") / "run"
    return FinishedRun(workdir, vit_jax.train(config, workdir), config)
