"""What the config.json of every ViT of Hugging Face `transformers` says in the same words."""

from collections.abc import Collection, Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
# What transformers takes where config.json says nothing, and a class has no default of its own.
USUAL = {
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-12,
    "num_channels": 3,
    "qkv_bias": True,
}


def options(value: Mapping[str, Any]) -> dict[str, Any]:
    """Sizes and conventions as options of a ViT that reads the class token.

    Args:
      value: all of what config.json says, with defaults for the rest.

    Raises:
      CheckpointError: an activation that is not here, or patches that are no squares.
    """
    if value["hidden_act"] not in ACTIVATIONS:
        raise CheckpointError(
            f"hidden_act {value['hidden_act']!r} is not supported; {', '.join(ACTIVATIONS)} are"
        )
    sides = value["patch_size"]
    sides = {sides} if isinstance(sides, int) else set(sides)
    if len(sides) > 1:
        raise CheckpointError(
            f"patches of {value['patch_size']} pixels: only square ones are supported"
        )
    return {
        "image_size": sizes.parse(value["image_size"]),
        "patch": sides.pop(),
        "depth": value["num_hidden_layers"],
        "width": value["hidden_size"],
        "mlp_dim": value["intermediate_size"],
        "heads": value["num_attention_heads"],
        "channels": value["num_channels"],
        "activation": ACTIVATIONS[value["hidden_act"]],
        "epsilon": value["layer_norm_eps"],
        "pool": "token",
    }


# What no tensor contains, and which of our options says it.
_NOT_IN_TENSORS = {
    "image_size": "image_size",
    "num_attention_heads": "heads",
    "hidden_act": "activation",
    "layer_norm_eps": "epsilon",
}


def assumed(stated: Collection[str], more: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """The options that config.json does not contain, nor any tensor: transformers' own values are taken.

    Args:
      stated: the fields of config.json.
      more: further fields that no tensor contains, and our options.
    """
    fields = _NOT_IN_TENSORS | dict(more or {})
    return tuple(ours for theirs, ours in fields.items() if theirs not in stated)


def config_fields(config: PublishedViTConfig) -> dict[str, Any]:
    """What config.json says of a model, in those words; only the size of its MLPs some classes say otherwise."""
    size = config.image_size
    return {
        "image_size": size if isinstance(size, int) else list(size),
        "patch_size": config.patch,
        "num_channels": config.channels,
        "hidden_size": config.width,
        "num_hidden_layers": config.depth,
        "num_attention_heads": config.heads,
        "hidden_act": next(n for n, ours in ACTIVATIONS.items() if ours == config.activation),
        "layer_norm_eps": config.epsilon,
        "hidden_dropout_prob": config.dropout,
        "attention_probs_dropout_prob": config.attention_dropout,
        "qkv_bias": config.qkv_bias,
    }


def changed_fields(config: PublishedViTConfig, value: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that no tensor contains, of a model that differs from what config.json says.

    Args:
      value: see `options`.
    """
    stated, fields = options(value), config_fields(config)
    changed = {n: o for n, o in _NOT_IN_TENSORS.items() if stated[o] != getattr(config, o)}
    return {name: fields[name] for name in changed}
