"""Options of `config.optim` that change no trained parameter, which is hardly intended. A pattern that matches no
parameter at all is an error, see `patterns.check_rules`.
"""

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.base import patterns
from vit_jax.models import lora
from vit_jax.models.classifier import INPUTS
from vit_jax.optim import multipliers
from vit_jax.optim.options import Optim

_OF_DECAY = ("weight_decay_rules", "weight_decay_by")


def find_unreached(
    config: Optim,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, int] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> list[str]:
    """A sentence for each option that changes no trained parameter.

    Args:
      config: `config.optim`, for which `optim.make` makes an optimizer of these parameters.
      shapes: of every parameter of the training state, by name.
      layers, inputs: see `multipliers.learning_rates`.
    """
    frozen, frozen_layers = patterns.select(config.freeze, shapes, "config.optim.freeze")
    trained = {name: shape for name, shape in shapes.items() if name not in frozen}
    names = {name: (name,) for name in trained}
    sentences = _of_decay(config, shapes, trained)
    sentences += _of_rules(config.lr_rules, names, "lr_rules")
    if config.layer_decay != 1:
        by_layer = multipliers.layer_multipliers(config, shapes, layers, inputs)
        if not any(_changes(by_layer[name], frozen_layers.get(name)) for name in trained):
            sentences.append(
                f"config.optim.layer_decay = {config.layer_decay:g} changes no rate: all that is trained follows the "
                "last layer; set it to 1"
            )
    for pattern in config.late:
        if not patterns.matching([pattern], trained):
            sentences.append(
                f"config.optim.late: all parameters that {pattern!r} matches are frozen (config.optim.freeze), so that "
                "it changes none"
            )
    return sentences


def _of_decay(config: Optim, shapes: Mapping, trained: Mapping) -> list[str]:
    if not config.weight_decay:
        default = Optim()
        return [
            f"config.optim.{name} = {getattr(config, name)!r} changes nothing, since config.optim.weight_decay is 0"
            for name in _OF_DECAY
            if getattr(config, name) != getattr(default, name)
        ]
    decays = multipliers.weight_decays(config, shapes)
    if not any(decays[name] for name in trained):
        return [
            f"config.optim.weight_decay = {config.weight_decay:g} changes no parameter: none that is trained is one of "
            "config.optim.weight_decay_rules; set it to 0, or name some there"
        ]
    names = {name: (name, *lora.kernel_names(name)) for name in trained}
    return _of_rules(config.weight_decay_rules, names, "weight_decay_rules")


def _of_rules(
    rules: Sequence[tuple[str, float]], names: Mapping[str, Iterable[str]], field: str
) -> list[str]:
    """A sentence for each rule that decides on no trained parameter.

    Args:
      rules: (pattern, value), the first match wins.
      names: for each trained parameter the names that a rule may match.
      field: of `config.optim`.
    """
    left = dict(names)
    sentences = []
    for pattern, _ in rules:
        taken = [name for name, known in left.items() if patterns.matching([pattern], known)]
        if not taken:
            sentences.append(
                f"config.optim.{field}: the rule of {pattern!r} changes no parameter: all that it matches are frozen "
                "(config.optim.freeze), or taken by a rule before it"
            )
        for name in taken:
            del left[name]
    return sentences


def _changes(multiplier: float | np.ndarray, frozen: np.ndarray | None) -> bool:
    """Whether a multiplier changes a layer that is trained; `frozen` are some of a stack's, (layers,) bool."""
    values = np.ravel(multiplier)
    if frozen is not None and len(values) == len(frozen):
        values = values[~frozen]
    return bool((values != 1).any())
