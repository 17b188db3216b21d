"""Fits the parameters of one model to another: a new head, another resolution. Everything else must be the same, name by name."""

import math

import jax
import numpy as np
from absl import logging

from vit_jax import patterns
from vit_jax.models.embeddings import interpolate
from vit_jax.schema import ConfigError

POSITION = "position"


def adapt(loaded: dict, fresh: dict, *, reset: tuple[str, ...], resize: str, prefix: int) -> dict:
    """The parameters to start from.

    Args:
      loaded: nested dict of arrays, from a checkpoint.
      fresh: those of the new model, already placed on their devices.
      reset: patterns of parameters that keep their fresh values; what `loaded` has there is left out.
      resize: how position embeddings of another grid are interpolated, see `embeddings.interpolate`.
      prefix: rows of the position embedding that stand for no patch.

    Returns:
      A tree like `fresh`, in its shardings.

    Raises:
      ConfigError: a parameter is missing, left over or of another shape, and nothing said so.
    """
    source = dict(zip(patterns.names(loaded), jax.tree.leaves(loaded), strict=True))
    target = dict(zip(patterns.names(fresh), jax.tree.leaves(fresh), strict=True))
    patterns.check_patterns(reset, [*target, *source], "config.init_reset")
    anew = set(patterns.matching(reset, [*target, *source]))
    problems = [f"{name} {target[name].shape} is not in the checkpoint" for name in target if name not in source and name not in anew]
    problems += [f"{name} {source[name].shape} is in the checkpoint, but not in the model" for name in source if name not in target and name not in anew]

    def fit(name: str, new: jax.Array) -> jax.Array:
        if name in anew or name not in source:
            return new
        old = np.asarray(source[name])
        if name == POSITION and old.shape[-1] == new.shape[-1] and old.shape != new.shape:
            old_side, side = (math.isqrt(rows.shape[1] - prefix) for rows in (old, new))
            if old_side**2 + prefix == old.shape[1]:
                logging.info("%s: %s is resized to %s by %s", name, old.shape, new.shape, resize)
                old = interpolate(old, (side, side), method=resize, prefix=prefix)
        if old.shape != new.shape:
            problems.append(f"{name} is {old.shape} in the checkpoint, {new.shape} in the model")
            return new
        return jax.device_put(old.astype(new.dtype), new.sharding)

    fitted = patterns.map_named(fit, fresh)
    if problems:
        raise ConfigError(
            "config.init_from: the checkpoint does not fit the model (name in config.init_reset what is to start anew):\n  "
            + "\n  ".join(problems)
        )
    if anew:
        logging.info("start anew: %s", ", ".join(name for name in target if name in anew))
    return fitted
