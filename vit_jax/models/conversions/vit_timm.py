"""ViT and DeiT of timm.

What the tensors do not tell is assumed, unless a config.json, the user or the model that is loaded
says it: the number of heads, as in the published size of that depth and width; the activation, the
exact GELU with which timm computes ViT and DeiT, even where the weights come from code with the
tanh one (not so for some SigLIP models). The epsilon of layer norms is 1e-6.
"""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.models import vit
from vit_jax.models.conversions import pytorch
from vit_jax.models.conversions.contract import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    Open,
    Preprocessing,
    Recognised,
    Shapes,
    TimmConversion,
    count,
    image_size,
    patch_grid,
)
from vit_jax.models.conversions.rules import Rule
from vit_jax.models.conversions.vit_flax import refusal_everywhere, with_learned_position

_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_tanh", "gelu_erf": "gelu"}
_POOLS = {"token": "token", "mean": "avg", "map": "map"}


class Timm(TimmConversion):
    """ViT and DeiT."""

    conventions = {"epsilon": 1e-6}

    def recognise(self, shapes: Shapes, said: Mapping[str, Any]) -> Recognised | None:
        """See `Conversion`."""
        names = ("patch_embed.proj.weight", "blocks.0.attn.qkv.weight")
        backbone = any(name.startswith("patch_embed.backbone.") for name in shapes)
        if backbone or not any(name in shapes for name in names):
            return None
        return recognise(shapes, said)

    def rules(self, config: vit.Config, layout: Mapping[str, Any]) -> list[Rule]:
        """See `Conversion`."""
        ours, theirs = "encoder/layers", "blocks.{layer}"
        attention = f"{theirs}.attn"
        pool = "attn_pool"
        return [
            pytorch.convolution("embedding", "patch_embed.proj"),
            Rule("embedding/bias", "patch_embed.proj.bias"),
            Rule("class_token", "cls_token"),
            Rule("distillation_token", "dist_token"),
            Rule("registers", "reg_token"),
            Rule("position", "pos_embed"),
            *pytorch.norm(f"{ours}/attention_norm", f"{theirs}.norm1"),
            *pytorch.attention(
                f"{ours}/attention",
                (f"{attention}.qkv",),
                f"{attention}.proj",
                config.width,
                config.heads,
            ),
            *pytorch.norm(f"{ours}/attention/query_norm", f"{attention}.q_norm"),
            *pytorch.norm(f"{ours}/attention/key_norm", f"{attention}.k_norm"),
            *pytorch.norm(f"{ours}/mlp_norm", f"{theirs}.norm2"),
            *pytorch.linear(f"{ours}/mlp/up", f"{theirs}.mlp.fc1"),
            *pytorch.linear(f"{ours}/mlp/down", f"{theirs}.mlp.fc2"),
            *pytorch.norm("encoder/norm", "norm"),
            Rule("pool/probe", f"{pool}.latent"),
            *pytorch.attention(
                "pool/attention",
                (f"{pool}.q", f"{pool}.kv"),
                f"{pool}.proj",
                config.width,
                config.heads,
            ),
            *pytorch.norm("pool/norm", f"{pool}.norm"),
            *pytorch.linear("pool/mlp/up", f"{pool}.mlp.fc1"),
            *pytorch.linear("pool/mlp/down", f"{pool}.mlp.fc2"),
            # Before its version 0.8, for ImageNet-21k.
            *pytorch.linear("representation", "pre_logits.fc"),
            *pytorch.linear("head", "head"),
            *pytorch.linear("head_distilled", "head_dist"),
        ]

    def refusal(self, config: vit.Config) -> str:
        """See `Conversion`."""
        if config.distilled and (not config.distillation_head or config.registers):
            return "timm's distilled models read both tokens and have no registers"
        if config.registers and config.prefix:
            return "in timm registers have a position when the class token has one; here they have none"
        if config.pool not in _POOLS:
            return f"timm has no pooling {config.pool!r}"
        return refusal_everywhere(config)

    def expressed(self, config: vit.Config, params: dict) -> tuple[vit.Config, dict]:
        """Positions are learned."""
        return with_learned_position(config, params)

    def preprocessing(self, config: vit.Config) -> Preprocessing | None:
        """A plain ViT's may be Google's or DeiT's."""
        if not config.distilled:
            return None
        side = math.floor(min(config.height_width) / 0.9)
        return Preprocessing(config.image_size, IMAGENET_MEAN, IMAGENET_STD, "central", side)

    def architecture(self, config: vit.Config) -> tuple[str, dict[str, Any]]:
        """See `TimmConversion`."""
        name = "deit_base_distilled_patch16_224" if config.distilled else "vit_base_patch16_224"
        return name, arguments(config) | {"patch_size": config.patch}


def arguments(config: vit.Config) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer, except its patch size."""
    if config.representation:
        raise CheckpointError(
            "timm has had no layer before the head since version 0.8: write a .safetensors file"
        )
    return {
        "img_size": timm_size(config.image_size),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio(config.mlp_dim, config.width),
        "class_token": config.pool == "token",
        "global_pool": _POOLS[config.pool],
        "fc_norm": False,
        "no_embed_class": not config.prefix,
        "reg_tokens": config.registers,
        "qk_norm": config.qk_norm,
        "act_layer": config.activation,
    }


def recognise(shapes: Shapes, said: Mapping[str, Any], stride: int = 1) -> Recognised:
    """A ViT whose patches are counted in `stride` pixels."""
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    depth = count(shapes, r"blocks\.(\d+)\.")
    distilled, has_class = "dist_token" in shapes, "cls_token" in shapes
    prefixes = (1 + distilled, 0) if has_class else (0,)
    grid, prefix = patch_grid(shapes["pos_embed"][1], prefixes, patch * stride, said)
    options = {
        "image_size": image_size(grid, patch * stride),
        "num_classes": shapes.get("head.bias", (0,))[0],
        "patch": patch,
        "depth": depth,
        "width": width,
        "mlp_dim": shapes["blocks.0.mlp.fc1.weight"][0],
        "pool": "map" if "attn_pool.latent" in shapes else "token" if has_class else "mean",
        "representation": shapes.get("pre_logits.fc.bias", (0,))[0],
        "position_of_class": bool(prefix),
        "distilled": distilled,
        "registers": shapes["reg_token"][1] if "reg_token" in shapes else 0,
        "qk_norm": "blocks.0.attn.q_norm.weight" in shapes,
        "activation": activation(said),
        "channels": channels,
    }
    if "num_heads" in said:
        return Recognised(options | {"heads": said["num_heads"]})
    published = {(d, w): heads for d, w, _, heads in vit.SIZES.values()}
    heads = published.get((depth, width), max(width // 64, 1))
    doubt = "" if (depth, width) in published else f"heads={heads} is taken, one for 64 channels"
    return Recognised(options | {"heads": heads}, open={"heads": Open(doubt=doubt)})


def activation(said: Mapping[str, Any]) -> str:
    """What a folder's config.json says, or timm's usual one."""
    name = said.get("act_layer", "gelu")
    if name not in _ACTIVATIONS:
        raise CheckpointError(
            f"the activation {name!r} is not supported; {', '.join(_ACTIVATIONS)} are"
        )
    return _ACTIVATIONS[name]


def timm_size(size: sizes.Size) -> int | list[int]:
    """An image size as timm has it in JSON."""
    return size if isinstance(size, int) else list(size)


def ratio(hidden: int, width: int) -> float:
    """The factor that timm multiplies `width` with and rounds down, to get `hidden`."""
    factor = hidden / width
    return factor if int(width * factor) == hidden else math.nextafter(factor, math.inf)
