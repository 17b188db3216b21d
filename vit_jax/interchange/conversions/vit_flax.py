"""ViTs of google-research/vision_transformer and of big_vision.

Their names are variants of each other: modules of a block are numbered as Linen does or as Flax did
before; big_vision's blocks may be stacked, its positions have no row for the class token, and its
attention pooling may stand under a name of its own. What no file tells: activation and epsilon, which
both codes have as tanh GELU and 1e-6; the image size of a ViT with sine-cosine positions.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from vit_jax.base import schema
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, flax
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models import positions
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

POSITION_OFFICIAL = "Transformer/posembed_input/pos_embedding"
POSITION_BIG_VISION = "pos_embedding"
POSITIONS = (POSITION_OFFICIAL, POSITION_BIG_VISION, "Transformer/pos_embedding")
# Numbers of a block's second norm, attention and MLP. Before Linen one counter ran over modules of
# all kinds.
NUMBERS = {"linen": (1, 0, 0), "pre_linen": (2, 1, 3)}
_NO_POOL = (
    "there is neither a class token nor attention pooling, and pool='mean' is taken. big_vision's "
    "pool_type='0' has the same tensors: for that set pool='first'"
)


class Official(contract.Conversion):
    """google-research/vision_transformer."""

    conventions = {"activation": "gelu_tanh", "epsilon": 1e-6}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if POSITION_OFFICIAL not in shapes or "conv_root/kernel" in shapes:
            return None
        return recognise(shapes, metadata)

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        return [*flax.affine("embedding", "embedding"), *rules(layout)]

    def layout(self, config: PublishedViTConfig) -> dict:
        """The names from before Linen, as in most published files."""
        return dict(numbers="pre_linen", scanned=False, position=POSITION_OFFICIAL, pooling="")

    def refusal(self, config: PublishedViTConfig) -> str:
        if config.pool not in ("token", "mean"):
            return f"google-research/vision_transformer has no pooling {config.pool!r}"
        return refusal_everywhere(config)

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        """Positions are learned, and the class token has one."""
        return with_class_row(*with_learned_position(config, params))


class BigVision(Official):
    """google-research/big_vision, whose class token has no position: it is added to the token."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if "embedding/kernel" not in shapes or "conv_root/kernel" in shapes:
            return None
        detected = recognise(shapes, metadata)
        if detected.options["pool"] == "mean":
            detected = dataclasses.replace(
                detected, open={"pool": contract.Open(("mean", "first"), _NO_POOL)}
            )
        return detected

    def layout(self, config: PublishedViTConfig) -> dict:
        """A tensor for each block's."""
        return dict(
            numbers="linen", scanned=False, position=POSITION_BIG_VISION, pooling="MAPHead_0/"
        )

    def refusal(self, config: PublishedViTConfig) -> str:
        return refusal_everywhere(config)

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        if config.position != "sincos2d":  # which files without a table have
            config, params = with_learned_position(config, params)
        return without_class_row(config, params)


def recognise(
    shapes: contract.Shapes, metadata: Mapping[str, Any], stride: int = 1
) -> contract.DetectedModel:
    """A ViT whose patches are counted in `stride` pixels."""
    before_linen = any("MultiHeadDotProductAttention_1/" in name for name in shapes)
    layout = {
        "numbers": "pre_linen" if before_linen else "linen",
        "scanned": any(name.startswith("Transformer/encoderblock/") for name in shapes),
        "position": next((name for name in POSITIONS if name in shapes), None),
        "pooling": "" if "probe" in shapes else "MAPHead_0/",
    }
    _, attention, mlp = NUMBERS[layout["numbers"]]
    block = "Transformer/encoderblock" + ("" if layout["scanned"] else "_0")
    query = f"{block}/MultiHeadDotProductAttention_{attention}/query/kernel"
    *layers, width, heads, _ = shapes[query]
    patch, across, channels, _ = shapes["embedding/kernel"]
    if patch != across:
        raise CheckpointError(f"patches of {patch}x{across} pixels: only square ones are supported")
    has_probe = f"{layout['pooling']}probe" in shapes
    pool = "map" if has_probe else "token" if "cls" in shapes else "mean"
    options = {
        "num_classes": shapes.get("head/bias", (0,))[0],
        "patch": patch,
        "depth": layers[0]
        if layers
        else contract.count_layers(shapes, r"Transformer/encoderblock_(\d+)/"),
        "width": width,
        "mlp_dim": shapes[f"{block}/MlpBlock_{mlp}/Dense_0/kernel"][-1],
        "heads": heads,
        "pool": pool,
        "representation": shapes.get("pre_logits/bias", (0,))[0],
        "channels": channels,
    }
    pixels = patch * stride
    if layout["position"] is None:
        size = contract.USUAL_IMAGE_SIZE // pixels * pixels
        options |= {"position": "sincos2d", "position_of_class": False, "image_size": size}
        return contract.DetectedModel(
            options, layout, assumed=("image_size", *Official.conventions)
        )
    # In the official code the class token always has a position, in big_vision never, but in files
    # that have come from there.
    official = layout["position"] == POSITION_OFFICIAL
    prefixes = ((1,) if official else (1, 0)) if pool == "token" else (0,)
    grid, prefix = contract.patch_grid(shapes[layout["position"]][1], prefixes, pixels, metadata)
    options |= {"position_of_class": bool(prefix), "image_size": contract.image_size(grid, pixels)}
    return contract.DetectedModel(options, layout, assumed=tuple(Official.conventions))


def rules(layout: Mapping[str, Any]) -> list[Rule]:
    """The rules of all parameters but the patch embedding."""
    block = "Transformer/encoderblock" if layout["scanned"] else "Transformer/encoderblock_{layer}"
    norm, attention, mlp = NUMBERS[layout["numbers"]]
    pooling = layout["pooling"]
    return [
        Rule("class_token", "cls"),
        Rule("position", layout["position"] or POSITION_BIG_VISION),
        *flax.norm("encoder/layers/attention_norm", f"{block}/LayerNorm_0"),
        *flax.attention(
            "encoder/layers/attention", f"{block}/MultiHeadDotProductAttention_{attention}"
        ),
        *flax.norm("encoder/layers/mlp_norm", f"{block}/LayerNorm_{norm}"),
        *flax.mlp("encoder/layers/mlp", f"{block}/MlpBlock_{mlp}"),
        *flax.norm("encoder/norm", "Transformer/encoder_norm"),
        Rule("pool/probe", f"{pooling}probe"),
        *flax.attention("pool/attention", f"{pooling}MultiHeadDotProductAttention_0"),
        *flax.norm("pool/norm", f"{pooling}LayerNorm_0"),
        *flax.mlp("pool/mlp", f"{pooling}MlpBlock_0"),
        *flax.affine("representation", "pre_logits"),
        *flax.affine("head", "head"),
    ]


def refusal_everywhere(config: PublishedViTConfig) -> str:
    """What of a model none of these codes can compute; '' if there is nothing."""
    if parts := parts_beside(config):
        return f"the format has no {', no '.join(parts)}"
    own = config.pool in ("gem", "token_mean")
    if own or config.weighted_layers:
        option = f"pool={config.pool}" if own else "weighted_layers=True"
        return f"the format has no {option}"
    if config.position_place in ("", "stem"):
        return ""
    return (
        f"the format has no {config.position} positions in layers (position_at="
        f"{config.position_at}), only at the stem"
    )


def parts_beside(config: PublishedViTConfig, known: Collection[str] = ()) -> list[str]:
    """The parts of a ViT that are not in the one of 2020, as 'option=value', but for the options `known`."""
    fields = [f for f in schema.options(PublishedViTConfig) if f.metadata["published"]]
    names = {f.name for f in fields if f.metadata["role"] in ("structure", "convention")}
    usual = {field.name: field.default for field in fields}
    return [
        f"{name}={getattr(config, name)!r}"
        for name in sorted(names - {*_OLD_PARTS, *known})
        if getattr(config, name) != usual[name]
    ]


# What each code refuses in its own words, or has.
_OLD_PARTS = (
    "parallel", "qk_norm", "qkv_bias", "norm_bias", "weighted_layers", "position_of_class", "distillation_head"
)  # fmt: skip


def with_learned_position(
    config: PublishedViTConfig, params: dict
) -> tuple[PublishedViTConfig, dict]:
    """The same model with its positions as a learned table of all patches: fixed ones, those of columns
    and rows, or zeros for none.
    """
    kind = positions.of(config)
    table = kind.as_learned(params.get("position"))
    of_class = config.position_of_class and kind.has_prefix
    config = dataclasses.replace(config, position="learned", position_of_class=of_class)
    return config, params | {"position": table}


def with_class_row(config: PublishedViTConfig, params: dict) -> tuple[PublishedViTConfig, dict]:
    """The same model with positions of class and distillation token: zero if it had none."""
    if not config.has_class_token or config.position != "learned" or config.prefix:
        return config, params
    table = np.asarray(params["position"])
    rows = np.zeros((1, config.tokens_with_position, config.width), table.dtype)
    config = dataclasses.replace(config, position_of_class=True)
    return config, params | {"position": np.concatenate([rows, table], axis=1)}


def without_class_row(config: PublishedViTConfig, params: dict) -> tuple[PublishedViTConfig, dict]:
    """The same model without a position of the class token: what it had is added to the token."""
    if config.prefix != 1:
        return config, params
    table, token = (np.asarray(params[name]) for name in ("position", "class_token"))
    params = params | {"position": table[:, 1:], "class_token": token + table[:, :1]}
    return dataclasses.replace(config, position_of_class=False), params
