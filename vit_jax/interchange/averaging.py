"""Averages of weights: of several fine-tuned models (a soup, arXiv 2203.05482), or of a run's last checkpoints.
Which models a greedy soup takes is in `evaluation.soups`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from etils import epath

from vit_jax.base import patterns, places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.checkpoints import reading
from vit_jax.interchange import file_header, formats
from vit_jax.interchange.formats import LoadedCheckpoint


def last_checkpoints(run: epath.PathLike, count: int) -> list[epath.Path]:
    """The last `count` checkpoints of a run, oldest first.

    Args:
      run: its workdir or its checkpoints folder.

    Raises:
      CheckpointError: it has fewer.
    """
    folder = places.locate(run)
    if folder.name != reading.FOLDER:
        folder = folder / reading.FOLDER
    steps = reading.saved_steps(folder)
    if len(steps) < count:
        raise CheckpointError(
            f"{run} has {len(steps)} checkpoints, and --last={count}: train with --config.checkpoint.keep={count} or "
            "more, or average fewer"
        )
    return [folder / str(step) for step in steps[-count:]]


def read_alike(paths: Sequence[epath.PathLike]) -> list[LoadedCheckpoint]:
    """Checkpoints of any format whose weights can be averaged.

    Raises:
      ConfigError: fewer than two are given, or they are of unlike models, classes or preprocessing.
      CheckpointError: one cannot be read, or what is not trained differs, such as running statistics.
    """
    if len(paths) < 2:
        raise ConfigError(
            f"an average needs two checkpoints or more, got {', '.join(map(str, paths)) or 'none'}: "
            "name several, or set --last=N for the last N of a run"
        )
    checkpoints = [formats.read_checkpoint(path) for path in paths]
    first, described = checkpoints[0], _description(checkpoints[0])
    for path, other in zip(paths[1:], checkpoints[1:], strict=True):
        for field, value in _description(other).items():
            if value != described.get(field):
                raise ConfigError(
                    f"{path} cannot be averaged with {paths[0]}: {field} is {value}, and there "
                    f"{described.get(field)}"
                )
        pairs = zip(patterns.names(first.variables), _leaves(first), _leaves(other), strict=True)
        for name, array, another in pairs:
            if not np.array_equal(np.asarray(array), np.asarray(another)):
                raise CheckpointError(
                    f"{path} cannot be averaged with {paths[0]}: {name} is not trained and differs. The average of "
                    "running statistics is not the statistics of the average"
                )
    return checkpoints


def average(models: Sequence[LoadedCheckpoint]) -> LoadedCheckpoint:
    """The first model with the mean of all parameters, summed in float64; each is read when it is used."""
    params = jax.tree.map(_mean, *(model.params for model in models))
    return dataclasses.replace(models[0], params=params, extras={}, adapters=None, objective=None)


def _mean(*leaves: Any) -> LazyArray:
    shape, dtype = tuple(leaves[0].shape), np.dtype(leaves[0].dtype)

    def read() -> np.ndarray:
        total = np.zeros(shape, np.float64)
        for leaf in leaves:
            total += np.asarray(leaf)
        return (total / len(leaves)).astype(dtype)

    return LazyArray(shape, dtype, read)


def _description(model: LoadedCheckpoint) -> dict[str, Any]:
    """What models must have in common."""
    config = model.model_config
    options = {
        f"model.{name}": value for name, value in file_header.options_of_model(config).items()
    }
    return {
        "the family": type(config).__module__.split(".")[-1],
        **options,
        "model.channels": config.channels,
        "model.num_classes": config.num_classes,
        "the list of classes": model.classes,
        "the preprocessing": model.preprocessing,
        "the function from logits to probabilities": formats.probabilities_of(model),
        "the settings of its answers": model.settings,
    }


def _leaves(model: LoadedCheckpoint) -> list:
    return jax.tree.leaves(model.variables)
