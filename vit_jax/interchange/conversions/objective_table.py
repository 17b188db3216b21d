"""Which formats keep what an objective owns, and what translates between their names and ours: one table, objective →
format → `ObjectiveConversion`. Objectives know nothing of it. A translation is imported when it is asked for.
"""

import importlib
from collections.abc import Iterator, Mapping

from vit_jax import objectives
from vit_jax.interchange.conversions.contract import ObjectiveConversion
from vit_jax.objectives.contract import Objective

# Modules that have a dict `CONVERSIONS`, by the objective's name.
_PLACES = {"mae": "vit_jax.interchange.conversions.mae"}


def objective_conversions(kind: type[Objective]) -> Mapping[str, ObjectiveConversion]:
    """An objective's conversion for each format that others keep what it owns in, {} if there is none: of the table,
    or, of an objective from outside the package, of its own `conversions()`.
    """
    for name, place in _PLACES.items():
        if kind is objectives.OBJECTIVES[name]:
            return importlib.import_module(place).CONVERSIONS
    return kind.conversions()


def kinds_of_the_package() -> Iterator[type[Objective]]:
    """The objectives in the table."""
    return map(objectives.OBJECTIVES.__getitem__, _PLACES)
