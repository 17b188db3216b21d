"""How the learning rate and the weight decay differ from parameter to parameter: rules by name and
layer-wise decay.
"""

import re
from collections.abc import Mapping, Sequence

import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models.classifier import INPUTS
from vit_jax.optim.options import Optim


def learning_rates(
    config: Optim,
    shapes: Mapping[str, tuple[int, ...]],
    layers: Mapping[str, int] | None = None,
    inputs: Sequence[str] = INPUTS,
) -> dict[str, float | np.ndarray]:
    """The multiplier of the learning rate by parameter name: `lr_rules` times layer-wise decay.

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
    layers, decay = layers or _only_stack(shapes, inputs), config.layer_decay
    return {
        name: multiplier * _layer_multiplier(name, len(shapes[name]), layers, inputs, decay)
        for name, multiplier in multipliers.items()
    }


def weight_decays(config: Optim, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """The weight decay by parameter name: `weight_decay` times the value of the first of
    `weight_decay_rules` that matches, else 0.
    """
    patterns.check_rules(config.weight_decay_rules, list(shapes), "config.optim.weight_decay_rules")
    return {
        name: config.weight_decay * patterns.first_match(config.weight_decay_rules, name, 0.0)
        for name in shapes
    }


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
