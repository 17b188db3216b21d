"""How the learning rate and the weight decay differ from parameter to parameter: rules by name and
layer-wise decay.
"""

import re
from collections.abc import Mapping

import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError

# What comes before the first layer, at the top of the tree.
_INPUTS = re.compile(r"(embedding|position|registers?|\w*token)(/.*)?")


def learning_rates(config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float | np.ndarray]:
    """By parameter name, the multiplier of the learning rate: `lr_rules` times layer-wise decay.

    Args:
      config: `config.optim`.
      shapes: of every parameter, by name.

    Returns:
      A float, or for stacked parameters with layer-wise decay an array (layers, 1, …) that
      broadcasts against the parameter.
    """
    patterns.check_rules(config.lr_rules, list(shapes), "config.optim.lr_rules")
    depth = _depth(shapes) if config.layer_decay != 1 else 0
    return {
        name: patterns.first_match(config.lr_rules, name, 1.0)
        * _layer_multiplier(name, len(shape), depth, config.layer_decay)
        for name, shape in shapes.items()
    }


def weight_decays(config, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, float]:
    """By parameter name, `weight_decay` times the value of the first of `weight_decay_rules` that
    matches, else 0.
    """
    patterns.check_rules(config.weight_decay_rules, list(shapes), "config.optim.weight_decay_rules")
    return {
        name: config.weight_decay * patterns.first_match(config.weight_decay_rules, name, 0.0)
        for name in shapes
    }


def _layer_multiplier(name: str, rank: int, depth: int, decay: float) -> float | np.ndarray:
    """decay^(depth + 1 - l), with l = 0 for the inputs, i + 1 for layer i, depth + 1 for all that
    follows the layers.

    As in MAE (util/lr_decay.py), the last norm, pooling and head all follow; so does a name that
    nobody foresaw.
    """
    if decay == 1:
        return 1.0
    if _is_input(name):
        return decay ** (depth + 1)
    if patterns.is_stacked(name):
        return (decay ** np.arange(depth, 0, -1.0)).reshape((depth,) + (1,) * (rank - 1))
    return 1.0


def _is_input(name: str) -> bool:
    return _INPUTS.fullmatch(name) is not None


def _depth(shapes: Mapping[str, tuple[int, ...]]) -> int:
    stacks = {
        "/".join(name.split("/")[: name.split("/").index("layers") + 1]): shape[0]
        for name, shape in shapes.items()
        if patterns.is_stacked(name) and not _is_input(name)
    }
    if len(stacks) != 1:
        found = ", ".join(stacks) or "none"
        raise ConfigError(
            f"config.optim.layer_decay needs a model with exactly one stack of layers (found: {found}); "
            "set it to 1 and use lr_rules"
        )
    return next(iter(stacks.values()))
