"""Evaluators of users before the run: what would fail when the run has trained fails in seconds instead.

The model is traced with a batch of which only the shape is known. What is computed of its outputs on the host is
computed of numbers that are made up.
"""

import pathlib
import traceback
from collections.abc import Callable

import jax
import numpy as np

from vit_jax.base.errors import ConfigError, reason
from vit_jax.base.sizes import height_width
from vit_jax.data.options import Data
from vit_jax.evaluation.contract import EvalContext, Evaluator
from vit_jax.models import registry

_BATCH = 2  # images of a traced batch


def rehearse(prefix: str, evaluator: Evaluator, file: str) -> None:
    """Rehearses an evaluator of a user. This package's own are tested with its models, and are not rehearsed: a trace
    takes from a tenth of a second to several.

    Args:
      prefix: of its metrics.
      file: that defines it.

    Raises:
      ConfigError: it failed; it says where, and what was expected.
    """
    try:
        evaluator.rehearse()
    except Exception as error:  # A user's code raises anything.
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if frame.filename == file]
        where = f"{file}, line {own[-1].lineno}, {own[-1].line!r}" if own else file
        raise ConfigError(
            f"config.eval.evaluators: {prefix!r} ({type(evaluator).__name__} of {pathlib.Path(file).name}) fails "
            f"before the run: {where}: {type(error).__name__}: {reason(error)}. Expected: {evaluator.expects}"
        ) from error


def check_output(
    forward: Callable, context: EvalContext, data: Data, outputs: int | None = None
) -> int:
    """Traces what an evaluator computes of a batch by the model.

    Args:
      forward: weights and images (B, H, W, C) uint8 to an array (B, outputs).
      context: of the evaluator.
      data: the section of the config that says how its images are.
      outputs: how many they must be, if that is known.

    Returns:
      How many there are.

    Raises:
      TypeError: the array has another shape.
    """
    weights = registry.abstract_weights(context.model_config)[1]
    shape = (_BATCH, *height_width(data.image_size), context.model_config.channels)
    output = jax.eval_shape(forward, weights, jax.ShapeDtypeStruct(shape, np.uint8))
    got = getattr(output, "shape", None)
    if got is None or len(got) != 2 or got != (_BATCH, outputs or got[1]):
        expected = f"({_BATCH}, {outputs or 'D'})"
        raise TypeError(f"of {_BATCH} images the model gives {got or output}, must be {expected}")
    return got[1]


def check_metrics(metrics: object, names: tuple[str, ...] | None) -> None:
    """Raises `TypeError` unless these are numbers by name, with the names that an evaluator gives beforehand."""
    if not isinstance(metrics, dict) or not metrics:
        raise TypeError(f"metrics are {metrics!r}, must be a dict of numbers by name")
    for name, value in metrics.items():
        if (
            not isinstance(name, str)
            or np.ndim(value)
            or np.asarray(value).dtype.kind not in "biuf"
        ):
            raise TypeError(f"the metric {name!r} is {value!r}, must be a number")
    if names is not None and set(names) != set(metrics):
        raise TypeError(f"metrics() gives {names}, but the metrics are {tuple(metrics)}")
