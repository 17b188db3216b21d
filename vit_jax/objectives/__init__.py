"""What is learnt. A new objective is one module with a class like `Supervised`, added to
`OBJECTIVES`.
"""

import dataclasses
from typing import Protocol

import jax
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option, options_said
from vit_jax.objectives.supervised import Supervised

OBJECTIVES = {"supervised": Supervised}


class Objective(Protocol):
    """A loss: called once per step (or part of one) inside the compiled program."""

    Options: type
    """Its dataclass of options, which the instance is made with."""

    def __call__(
        self, model: nnx.Module, images: jax.Array, targets: jax.Array, rngs: nnx.Rngs
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """images (B, S, S, 3) augmented and normalised, targets (B, K) -> loss (B,) and metrics,
        each (B,).
        """


@dataclasses.dataclass
class Name:
    """What is learnt; the other options are the objective's own."""

    name: str = option("supervised", "objective", choices=OBJECTIVES)


def option_classes() -> list[type]:
    """The option dataclass of every objective."""
    return [objective.Options for objective in OBJECTIVES.values()]


def make(config) -> Objective:
    """The objective of `config.objective`.

    Raises:
      ConfigError: an option that belongs to another objective.
    """
    options = options_said(config)
    cls = OBJECTIVES[options.pop("name")]
    known = {field.name for field in dataclasses.fields(cls.Options)}
    for name in options:
        if name not in known:
            raise ConfigError(
                f"objective {config.name} has no option {name!r}{nearest(name, known)}"
            )
    return cls(cls.Options(**options))
