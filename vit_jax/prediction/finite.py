"""Answers of a model that are no numbers: they are refused with their cause, and not handed on."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.models import registry


def all_finite(arrays: Any) -> bool:
    """Whether no number of several arrays on the host is NaN or infinite."""
    return all(np.isfinite(array).all() for array in jax.tree.leaves(arrays))


def check_answers(run: TrainedModel, names: Sequence[str], answers: Any) -> None:
    """Raises `CheckpointError` if the model answers NaN or infinity; the error names the first such image.

    Args:
      run: the model.
      names: of the images.
      answers: arrays (n, …) on the host.
    """
    if all_finite(answers):
        return
    leaves = jax.tree.leaves(answers)
    rows = zip(names, *leaves, strict=True)
    first = next(name for name, *of_image in rows if not all_finite(of_image))
    raise CheckpointError(
        f"{first}: what {run.directory} answers is not finite (NaN or infinity): {_cause(run)}"
    )


def check_weights(run: TrainedModel) -> None:
    """Raises `CheckpointError` if a weight of a model is NaN or infinite."""
    bad = _bad_weight(run)
    if bad:
        raise CheckpointError(f"{run.directory}: {_of_weight(bad)}")


def _cause(run: TrainedModel) -> str:
    bad = _bad_weight(run)
    if bad:
        return _of_weight(bad)
    return "its weights are finite, so numbers become too large on the way, for this image"


def _of_weight(name: str) -> str:
    return f"its weights {name} are not finite. Its training diverged, or the file is damaged: use another checkpoint"


def _bad_weight(run: TrainedModel) -> str:
    """The name of the first array of a model that has NaN or infinity; '' if there is none."""
    own = () if run.objective_modules is None else tuple(run.objective_modules.weights)
    for tree in (*registry.split(run.model)[1], *own):
        for name, array in patterns.named(tree).items():
            if not np.isfinite(np.asarray(array)).all():
                return name
    return ""
