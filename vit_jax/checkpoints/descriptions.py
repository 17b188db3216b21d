"""What a checkpoint says of itself: its description, JSON that is saved with a checksum."""

import dataclasses
import hashlib
import importlib.metadata
import json
from collections.abc import Mapping

from etils import epath

from vit_jax.base import schema, sections
from vit_jax.config import Config, default_config
from vit_jax.models import classifier, registry
from vit_jax.objectives.networks import evaluated_weights
from vit_jax.optim.options import keeps_average

_FORMAT = 1
_SEAL = "sha256"
STEP = "step"


def describe(
    config: Config,
    model_config: classifier.ClassifierConfig,
    classes: tuple[str, ...],
    examples: int,
    training_data: str = "",
) -> dict:
    """What a checkpoint says of itself, as JSON.

    Args:
      config: the run's.
      model_config: the family's config.
      classes: label names of the data.
      examples: how many there are to train on.
      training_data: their fingerprint (`record.Source`); '': not known.
    """
    packages = ("jax", "flax", "optax", "orbax-checkpoint", "vit_jax")
    return {
        "format": _FORMAT,
        "config": dataclasses.asdict(config),
        "model": {"name": config.model.name, **dataclasses.asdict(model_config)},
        "classes": list(classes),
        "training_examples": examples,
        "training_data": training_data,
        "versions": {name: importlib.metadata.version(name) for name in packages},
    }


def step_of(folder: epath.Path, description: dict) -> int:
    """The steps that a checkpoint's model was trained, also of a copy under another name.

    Of such a copy of a checkpoint that an earlier version saved they are unknown, and 0.
    """
    if STEP in description:
        return description[STEP]
    return int(folder.name) if folder.name.isdigit() else 0


def sealed(description: dict) -> dict:
    """The description with a checksum of it, as it is saved."""
    return description | {_SEAL: _seal_of(description)}


def unsealed(description: dict) -> dict | None:
    """A description as it was read, without its checksum, the config's sections by the names of this version; `None` if
    it is not what was saved.
    """
    if not (isinstance(description, dict) and {"config", "model", "classes"} <= description.keys()):
        return None
    # Earlier versions had neither of the two.
    if _SEAL not in description and "training_data" not in description:
        return with_current_names(description)
    rest = {name: value for name, value in description.items() if name != _SEAL}
    return with_current_names(rest) if description.get(_SEAL) == _seal_of(rest) else None


def with_current_names(description: dict) -> dict:
    """A description that an earlier version may have saved, its config's sections by the names of this version."""
    return description | {"config": sections.with_current_sections(description["config"])}


def _seal_of(description: dict) -> str:
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def stored_model_config(description: dict, **options) -> classifier.ClassifierConfig:
    """The family's config of the model that a checkpoint holds, with `options` in place of its own."""
    fields = description["model"] | options
    return registry.model_config(fields.pop("name"), **fields)


def filled_config(description: dict) -> dict:
    """The config in a description, of this version or an earlier one, as JSON has it: fields that it
    did not have are at their defaults, and options of the model that were not set are as the model
    has them.
    """
    filled = schema.fill(default_config(), description["config"]).to_dict()
    return with_model_options(filled, stored_model_config(description))


def with_model_options(config: Mapping, model: classifier.ClassifierConfig) -> dict:
    """A config as JSON has it, in which options of the model that are not set are as the model has them."""
    options = dataclasses.asdict(model)
    filled = dict(config["model"])
    for name, value in filled.items():
        if value is None:
            filled[name] = options.get(name)
    return json.loads(json.dumps({**config, "model": filled}))


def parts_to_use(description: dict) -> tuple[str, str]:
    """The names of the saved parts that are a model's parameters and what is not trained."""
    optim = description["config"]["optim"]
    kept = ["params"]
    if keeps_average(optim["name"], optim["ema"]):
        kept.append("ema")
    elif description.get("evaluated"):
        kept.append(description["evaluated"])
    name = evaluated_weights(kept)
    return name, "ema_variables" if name == "ema" else "model_variables"
