"""Whether a step's number means the same in a run that is resumed. Positions in the data and in the schedule are
counted in steps. A config with other steps would repeat images or leave some out: it is refused, whatever
`config.checkpoint.on_config_change` says.
"""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from vit_jax.base import durations
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import descriptions
from vit_jax.data.options import Data
from vit_jax.training.guards import changed_fields, few_other_images

# Fields that decide which images a step has, with the reason.
_OF_STEPS = {
    "batch_size": "it is how many images a step has",
    "data.repeats": "a step has batch_size / repeats different images",
    "data.native_budget": "a step has as many images as it has patches for",
}
# The same where there is a budget; without one a step has batch_size images, whatever their patches.
_OF_BUDGETS = {
    "data.native_budget": "a step has as many images as it has patches for",
    "data.native_tokens": "it is how many patches an image takes of native_budget",
    "data.native_lengths": "they are how many patches an image takes of native_budget",
    "data.native_multiple": "the images of a step are a multiple of it",
    "data.repeats": "a step has its images / repeats different ones",
    "seed": "it decides which of native_lengths a step has, and so how many images",
}


@dataclasses.dataclass(frozen=True)
class _Batches:
    """The part of a config that says how many images a step has."""

    seed: int
    batch_size: int
    data: Data


def changed_steps(saved: dict, description: dict) -> list[str]:
    """The changed config fields that give the steps of a run other images.

    Args:
      saved: the description of a checkpoint.
      description: of the run as it is now.
    """
    before = descriptions.filled_config(saved)
    now = descriptions.filled_config(description)
    names = _fields_of_steps(before, now)
    return [name for name in names if _value(before, name) != _value(now, name)]


def check_position(
    step: int, total_steps: int, saved: dict, description: dict, workdir: os.PathLike | str
) -> None:
    """Checks that a step means the same in the run that a checkpoint is of as in the config of now.

    Args:
      step: of the checkpoint.
      total_steps: of the run, by the config of now.
      saved: the checkpoint's description.
      description: of the run as it is now.
      workdir: of the run, for the message.

    Raises:
      ConfigError: its steps have other images, or it is beyond the end.
    """
    before = descriptions.filled_config(saved)
    now = descriptions.filled_config(description)
    instead = f"or set a new --workdir and --config.init_from={workdir}"
    seen = _images_before(step, before)
    changed = changed_steps(saved, description)
    if changed:
        name = changed[0]
        old = _value(before, name)
        new = _value(now, name)
        reason = _fields_of_steps(before, now)[name]
        difference = f"config.{name} = {_text(new)} differs from {_text(old)}"
        images_now = f"{_images_before(step, now):,}{_different(now)}"
        raise ConfigError(
            f"{difference}, with which the run came to step {step:,}, after {seen:,} images: {reason}, and after "
            f"{step:,} steps of now it would be {images_now}, so that images and the schedule would not continue "
            f"where they were, even with config.checkpoint.on_config_change=allow. Put back "
            f"--config.{name}={_text(old)}, {instead}"
        )
    if step <= total_steps or not changed_fields(saved, description):
        return
    old = before["duration"]
    new = now["duration"]
    same_duration = durations.normal(old) == durations.normal(new)
    if same_duration and few_other_images(saved, description):
        return
    raise ConfigError(
        f"the run is at step {step:,}, after {seen:,} images, and config.duration = {new!r} ends at step "
        f"{total_steps:,}: it was {old!r}, of {saved['training_examples']:,} training images, of which there are "
        f"{description['training_examples']:,} now. Put back what was changed, set a longer config.duration, {instead}"
    )


def _fields_of_steps(before: Mapping, now: Mapping) -> dict[str, str]:
    budgets = [config["data"]["native_budget"] for config in (before, now)]
    if not any(budgets):
        return _OF_STEPS
    fields = dict(_OF_BUDGETS)
    lengths = [_lengths(config["data"]) for config in (before, now)]
    if max(map(len, lengths)) <= 1:
        del fields["seed"]
    return fields


def _value(config: Mapping, name: str) -> Any:
    if name == "data.native_lengths":
        return _lengths(config["data"])
    value = config
    for part in name.split("."):
        value = value[part]
    return value


def _lengths(data: Mapping) -> list[tuple[int, int]]:
    """(patches, share), whether shares are written or not; [] where images have one size."""
    if not data["native_tokens"]:
        return []
    from vit_jax.data import native_batches

    return native_batches.find_lengths(_data(data))


def _data(data: Mapping) -> Data:
    entries = [
        tuple(entry) if isinstance(entry, list) else entry for entry in data["native_lengths"]
    ]
    return Data(
        native_tokens=data["native_tokens"],
        native_lengths=tuple(entries),
        native_budget=data["native_budget"],
        native_multiple=data["native_multiple"],
    )


def _images_before(step: int, config: Mapping) -> int:
    """The images of the steps before `step`, copies by `data.repeats` among them."""
    if not config["data"]["native_budget"]:
        return step * config["batch_size"]
    from vit_jax.data import native_batches

    batches = _Batches(config["seed"], config["batch_size"], _data(config["data"]))
    return native_batches.Cycle(batches).images_before(step)


def _different(config: Mapping) -> str:
    repeats = config["data"]["repeats"]
    return f", each {repeats} times" if repeats > 1 else ""


def _text(value: Any) -> str:
    return str(value).replace(" ", "")
