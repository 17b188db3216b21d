"""Which formats keep what an objective owns, and what translates between their names and ours: one table, objective →
format → `ObjectiveConversion`. Objectives know nothing of it. A translation is imported when it is asked for.
"""

import importlib
from collections.abc import Iterator, Mapping

from vit_jax.interchange.conversions.contract import ObjectiveConversion
from vit_jax.objectives.contract import Objective

# Modules that have a dict `CONVERSIONS`, by the objective's class.
_PLACES = {
    "vit_jax.objectives.mae:Mae": "vit_jax.interchange.conversions.mae",
    "vit_jax.objectives.image_text.image_text:ImageText": "vit_jax.interchange.conversions.text_tower_formats",
}


def objective_conversions(kind: type[Objective]) -> Mapping[str, ObjectiveConversion]:
    """An objective's conversion for each format that others keep what it owns in, {} if there is none: of the table,
    or, of an objective from outside the package, of its own `conversions()`.
    """
    place = _PLACES.get(f"{kind.__module__}:{kind.__qualname__}")
    return importlib.import_module(place).CONVERSIONS if place else kind.conversions()


def kinds_of_the_package() -> Iterator[type[Objective]]:
    """The objectives in the table."""
    for name in _PLACES:
        module, _, kind = name.partition(":")
        yield getattr(importlib.import_module(module), kind)
