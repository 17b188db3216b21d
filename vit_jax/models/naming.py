"""What a model is called: by a listed name if its options are the name's, else by the nearest and what differs."""

import math
import re
from collections.abc import Iterator
from typing import Any

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier, registry

# Printed beside the name, fitted to the data, or gone after the first step.
_NOT_NAMED = {"image_size", "init"}


def nearest_name(config: classifier.ClassifierConfig, called: str = "") -> str:
    """The name that says most of a model; where a family's names end in the patch, of any patch.

    Args:
      called: what its run calls it; preferred if its options are the name's.
    """
    family = registry.family_of(config)
    if called and family.options_from_name(called) and not differences(config, called):
        return called

    def distance(name: str) -> tuple[int, float, int]:
        stated = len(family.options_from_name(name))
        differ = differences(config, name)
        steps = sum(_steps(getattr(config, option), value) for option, value in differ.items())
        return len(differ), steps, -stated

    return min(_candidates(family, config), key=distance)


def full_name(config: classifier.ClassifierConfig, called: str = "") -> str:
    """'ViT-B/16', or 'ViT-B/16 with depth 6 and heads 8' for a model that no name stands for; see `nearest_name`.
    Beside it the paper that the names do not say: 'DINOv3 ViT-B/16'.
    """
    paper, own = config.known_as
    if own:
        return f"{paper} {own}"
    name = nearest_name(config, called)
    *others, last = [f"{o} {getattr(config, o)}" for o in differences(config, name)] or [""]
    listed = f"{', '.join(others)} and {last}" if others else last
    name = f"{paper} {name}" if paper else name
    return f"{name} with {listed}" if listed else name


def differences(config: classifier.ClassifierConfig, name: str) -> dict[str, Any]:
    """The options that a name stands for and of which the model has others: the name's values."""
    family = registry.family_of(config)
    sizes = schema.with_role(family.Config, "size")
    usual = {f.name: f.default for f in schema.options(family.Config) if f.name in sizes}
    named = usual | family.options_from_name(name)
    return {
        option: value
        for option, value in named.items()
        if option not in _NOT_NAMED and getattr(config, option) != value
    }


def _candidates(family: registry.Family, config: classifier.ClassifierConfig) -> Iterator[str]:
    """The listed names that may be the model's, and the same with the model's patch."""
    for name in filter(config.may_be_called, family.VARIANTS):
        yield name
        other = re.sub(r"/\d+$", f"/{getattr(config, 'patch', '')}", name)
        if other == name:
            continue
        try:
            options = family.options_from_name(other)
        except ConfigError:  # a hybrid's number is its stride
            continue
        if options and options.get("patch") == config.patch:
            yield other


def _steps(first: Any, other: Any) -> float:
    """How far apart two sizes are, in doublings; 1 for what is no number."""
    numbers = all(isinstance(x, int | float) and x > 0 for x in (first, other))
    return abs(math.log2(first / other)) if numbers else 1.0
