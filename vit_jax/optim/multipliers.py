"""How the learning rate and the weight decay differ from parameter to parameter: rules by name and
layer-wise decay.
"""

import itertools
import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import lora
from vit_jax.models.classifier import INPUTS
from vit_jax.optim.options import Optim


def learning_rates(
    config: Optim,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, int] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> dict[str, float | np.ndarray]:
    """The multiplier of the learning rate by parameter name: `lr_rules` times layer-wise decay. An adapter counts as
    the layer that it adapts.

    Args:
      config: `config.optim`.
      shapes: of every parameter, by name.
      layers: see `classifier.ClassifierConfig.layers`; by default the one stack that there is.
      inputs: see `classifier.ClassifierConfig.inputs`.

    Returns:
      A float, or for stacked parameters with layer-wise decay an array (layers, 1, …) that
      broadcasts against the parameter.
    """
    patterns.check_rules(config.lr_rules, list(shapes), "config.optim.lr_rules")
    multipliers = {name: patterns.first_match(config.lr_rules, name, 1.0) for name in shapes}
    if config.layer_decay == 1:
        return multipliers
    by_layer = layer_multipliers(config, shapes, layers, inputs)
    return {name: multiplier * by_layer[name] for name, multiplier in multipliers.items()}


def layer_multipliers(
    config: Optim,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, int] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> dict[str, float | np.ndarray]:
    """The part of `learning_rates` that is layer-wise decay; arguments and result are the same."""
    adapted = {name: lora.adapted_layer(name) for name in shapes}
    if not layers:
        layers = _only_stack({adapted[name]: shape for name, shape in shapes.items()}, inputs)
    return {
        name: _layer_multiplier(adapted[name], len(shape), layers, inputs, config.layer_decay)
        for name, shape in shapes.items()
    }


def weight_decays(config: Optim, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """The weight decay by parameter name: `weight_decay` times the value of the first of
    `weight_decay_rules` that matches, else 0. A rule that matches a kernel matches its adapter too: both of its
    matrices decay, as in PEFT and loralib.
    """
    names = {name: (name, *lora.kernel_names(name)) for name in shapes}
    known = list(itertools.chain.from_iterable(names.values()))
    patterns.check_rules(config.weight_decay_rules, known, "config.optim.weight_decay_rules")
    return {
        name: config.weight_decay * _first_rule(config.weight_decay_rules, names[name], 0.0)
        for name in shapes
    }


def _first_rule(rules: Sequence[tuple[str, float]], names: Sequence[str], default: float) -> float:
    """The value of the first rule that matches one of the names of a parameter, else `default`."""
    for pattern, value in rules:
        if patterns.matching([pattern], names):
            return value
    return default


def _layer_multiplier(
    name: str, rank: int, layers: Mapping[str, int], inputs: Sequence[str], decay: float
) -> float | np.ndarray:
    """decay^(depth + 1 - l), with l = 0 for the inputs, i + 1 for layer i of all `depth` layers, depth
    + 1 for all that follows them.

    As in MAE (util/lr_decay.py), the last norm, pooling and head all follow; so do unknown names,
    and what an objective owns. In networks that stand side by side each counts its own layers.
    """
    for network, own in layers.items():
        if isinstance(own, Mapping) and name.startswith(f"{network}/"):
            return _layer_multiplier(name.removeprefix(f"{network}/"), rank, own, inputs, decay)
    layers = {name: count for name, count in layers.items() if isinstance(count, int)}
    depth, before = sum(layers.values()), 0
    for prefix, count in layers.items():
        if name.startswith(f"{prefix}/"):
            powers = decay ** np.arange(depth - before, depth - before - count, -1.0)
            if prefix.split("/")[-1] != patterns.STACK:
                return float(powers[0])
            return powers.reshape((count,) + (1,) * (rank - 1))
        before += count
    return decay ** (depth + 1) if _is_input(name, inputs) else 1.0


def _is_input(name: str, inputs: Sequence[str]) -> bool:
    return any(re.fullmatch(f"({pattern})(/.*)?", name) for pattern in inputs)


def _only_stack(shapes: Mapping[str, tuple[int, ...]], inputs: Sequence[str]) -> dict[str, int]:
    """The stack of layers among the parameters, if there is just one."""
    stacks = {
        "/".join(name.split("/")[: name.split("/").index(patterns.STACK) + 1]): shape[0]
        for name, shape in shapes.items()
        if patterns.is_stacked(name) and not _is_input(name, inputs)
    }
    if len(stacks) != 1:
        names = ", ".join(stacks) or "none"
        raise ConfigError(
            f"config.optim.layer_decay needs a model that says the order of its layers, or has exactly "
            f"one stack of them (found: {names}); set it to 1 and use lr_rules"
        )
    return stacks
