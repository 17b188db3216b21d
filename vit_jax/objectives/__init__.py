"""What is learned. A new objective is one module with a class like `Supervised`, added to
`OBJECTIVES`, or registered by a recipe with `register`. It is imported when a config names it.
"""

import dataclasses
from collections.abc import Callable

import jax
from ml_collections import ConfigDict

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.base.schema import nearest, option
from vit_jax.base.sections import NamedSection
from vit_jax.objectives.contract import Objective, ObjectiveContext

OBJECTIVES: LazyTable[type[Objective]] = LazyTable(
    {
        "supervised": "vit_jax.objectives.supervised:Supervised",
        "mae": "vit_jax.objectives.mae:Mae",
        "masked_patches": "vit_jax.objectives.masked_patches:MaskedPatches",
        "dino": "vit_jax.objectives.dino.dino:Dino",
        "distill": "vit_jax.objectives.distill:Distill",
        "features": "vit_jax.objectives.features.features:Features",
        "image_text": "vit_jax.objectives.image_text.image_text:ImageText",
        "sum": "vit_jax.objectives.sum.sum:Sum",
        "segmentation": "vit_jax.objectives.segmentation.segmentation:Segmentation",
    }
)
# What turns logits into probabilities, by the names that `probabilities` gives.
ACTIVATIONS = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid}


@dataclasses.dataclass(frozen=True)
class Name:
    """What is learned; the other options are the objective's own."""

    name: str = option("supervised", "objective")


class Section(NamedSection):
    """`config.objective`: the options of the objective that it names."""

    TITLE, NAME = "Objective", Name

    @classmethod
    def class_named(cls, name: str) -> type | None:
        return OBJECTIVES[name].Options if name in OBJECTIVES else None

    @classmethod
    def classes(cls) -> tuple[type, ...]:
        return tuple(option_classes())


def register(name: str, objective: type[Objective]) -> None:
    """Adds an objective from outside the package; before the recipe names it."""
    OBJECTIVES[name] = objective


def option_classes() -> list[type]:
    """The option dataclass of every objective."""
    return [objective.Options for objective in OBJECTIVES.values()]


def find_objective(config: Name | ConfigDict) -> tuple[type[Objective], object]:
    """The objective that `config.objective` names, and its options.

    Raises:
      ConfigError: there is none of this name, or an option belongs to another objective.
    """
    options = schema.given_options(config)
    name = options.pop("name")
    if name not in OBJECTIVES:
        raise ConfigError(
            f"config.objective.name = {name!r} is no objective{nearest(name, OBJECTIVES)}"
        )
    objective = OBJECTIVES[name]
    options = schema.checked_options(
        objective.Options, options, f"objective {name}", "config.objective."
    )
    options = objective.Options(**options)
    return objective.variant(options), options


def make(config: Name, context: ObjectiveContext) -> Objective:
    """The objective of a run; see `find_objective`."""
    objective, options = find_objective(config)
    return objective(options, context)


def loss(config: Name | ConfigDict) -> str:
    """The cross-entropy that a model is trained with, a `kind` of `supervised.cross_entropy`."""
    return getattr(find_objective(config)[1], "loss", "softmax")


def probabilities(config: Name | ConfigDict) -> str:
    """The function that turns the logits of a model trained this way into probabilities: 'softmax'
    or 'sigmoid'.
    """
    return "softmax" if loss(config) == "softmax" else "sigmoid"


def activation(config: Name | ConfigDict) -> Callable[[jax.Array], jax.Array]:
    """That function."""
    return ACTIVATIONS[probabilities(config)]
