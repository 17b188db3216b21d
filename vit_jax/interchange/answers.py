"""What a model's answers depend on beside its weights, its classes and the preprocessing of its images.

These are options of a run's config whose role is 'answers'. A feature that brings such an option gives it that role.
Then every format carries the option, and no format names the feature.
"""

import json
import operator
from collections.abc import Mapping
from typing import Any

from absl import logging
from etils import epath

from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError
from vit_jax.config import Config
from vit_jax.interchange.formats import LoadedCheckpoint

ROLE = "answers"
KEY = "settings"  # in the JSON of our files


def settings_of(config: Config) -> dict[str, Any]:
    """The options that answers depend on, where they are not at their defaults: JSON values by dotted name."""
    settings = {}
    for name, field in _options(type(config)).items():
        value = operator.attrgetter(name)(config)
        if value != field.default:
            settings[name] = json.loads(json.dumps(value))
    return settings


def known_settings(stated: Mapping[str, Any], path: epath.PathLike) -> dict[str, Any]:
    """The settings that a file states.

    Raises:
      CheckpointError: this version does not know one of them.
    """
    known = _options(Config)
    if unknown := [name for name in stated if name not in known]:
        raise CheckpointError(
            f"{path} was written by a later version: its answers depend on config.{unknown[0]} = "
            f"{stated[unknown[0]]!r}, which this version does not know"
        )
    return dict(stated)


def warn_not_held(checkpoint: LoadedCheckpoint, format: str, path: epath.PathLike) -> None:
    """Warns of what a file of tensors alone does not say of the model."""
    missing = []
    if checkpoint.classes:
        missing.append("the names of its classes (--classes)")
    if checkpoint.probabilities == "sigmoid":
        missing.append("that its probabilities are sigmoids (--config.objective.loss=sigmoid)")
    missing += [f"--config.{name}={value}" for name, value in checkpoint.settings.items()]
    if missing:
        logging.warning(
            "%s: the format %s has no place for %s: say it again wherever the file is read",
            path, format, ", ".join(missing),
        )  # fmt: skip


def warn_of_other_code(checkpoint: LoadedCheckpoint, library: str, path: epath.PathLike) -> None:
    """Warns of settings that another library does not follow when it reads the file."""
    settings = ", ".join(
        f"config.{name} = {value!r}" for name, value in checkpoint.settings.items()
    )
    if settings:
        logging.warning(
            "%s: %s does not know %s: there the same image gives other answers; vit_jax reads it from the file",
            path, library, settings,
        )  # fmt: skip


def _options(config_class: type) -> dict[str, Any]:
    """The options that answers depend on, by dotted name."""
    return {n: f for n, f in schema.walk(config_class) if f.metadata["role"] == ROLE}
