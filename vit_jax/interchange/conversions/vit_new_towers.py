"""New files for Hugging Face's other ViTs: DINOv2, DINOv3, CLIP and SigLIP, also with a head of one's own
training, where transformers has a class that computes it.

- Dinov2ForImageClassification reads the class token beside the mean of the patches: a head that reads
  only one of them has zeros for the other.
- CLIPForImageClassification reads the mean of the patches without a norm, SiglipForImageClassification
  that of the normed ones. Heads of CLIP's class token or of attention pooling have no class there.
- DINOv3 has no classifier there.
"""

import dataclasses
from typing import Any

import numpy as np

from vit_jax.base import sizes
from vit_jax.interchange.conversions import vit_config_json, vit_flax
from vit_jax.interchange.conversions.vit_towers import gated_size
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# Options in which a kind differs from the ViT of 2020.
_PARTS = {
    "dinov2": ("layer_scale", "gated_mlp", "keep_class_token"),
    "dinov3_vit": (
        "layer_scale", "gated_mlp", "rope", "rope_theta", "key_bias", "projection_bias", "crop_to_patches",
    ),
    "clip": ("pre_norm", "patch_bias", "last_norm", "keep_class_token"),
    "siglip": ("crop_to_patches",),
    "beit": ("layer_scale", "key_bias", "last_norm", "keep_class_token", "position_at"),
}  # fmt: skip
_NAMES = {
    "dinov2": "DINOv2",
    "dinov3_vit": "DINOv3",
    "clip": "CLIP",
    "siglip": "SigLIP",
    "beit": "BEiT",
}
_TO_TIMM = "to keep it as it is, convert with --to=timm"


def kind_of(config: PublishedViTConfig) -> str:
    """The kind of a model that is no ViT or DeiT of transformers, as in `vit_towers`; '' if it is one."""
    if config.position == "bias2d":
        return "beit"
    if config.rope == "centred":
        return "dinov3_vit"
    if config.layer_scale == "all":
        return "dinov2_with_registers" if config.registers else "dinov2"
    if config.pre_norm:
        return "clip"
    without_class = not config.has_class_token and not config.distilled
    return "siglip" if without_class and config.pool in ("map", "mean") else ""


def layout(config: PublishedViTConfig, kind: str) -> dict[str, Any]:
    """The `layout` of a new file."""
    if kind in ("clip", "siglip"):
        at = "vision_model."
        named = f"{at}head.attention.in_proj"  # PyTorch's own attention has no dot in these
        renamed = {f"{named}.{part}": f"{named}_{part}" for part in ("weight", "bias")}
        return {"kind": kind, "prefix": at, "renamed": renamed if config.pool == "map" else {}}
    with_head = config.num_classes and kind != "dinov3_vit"
    return {"kind": kind, "prefix": f"{kind}." if with_head else ""}


def refusal(config: PublishedViTConfig, kind: str) -> str:
    """Why the network of this kind in `transformers` cannot compute a model; '' if it can."""
    kind = kind.removesuffix("_with_registers")
    name = _NAMES[kind]
    if reason := _refused_head(config, kind):
        return f"{reason}; {_TO_TIMM}"
    lacks = {
        f"images of {sizes.size_text(config.image_size)}, only square ones": kind != "dinov3_vit"
        and len(set(config.height_width)) > 1,
        "distillation token": config.distilled,
        "tanh layer": config.representation,
        "qk_norm": config.qk_norm,
        "parallel blocks": config.parallel,
        "norms without biases": not config.norm_bias,
        f"mlp_dim={config.mlp_dim} with activation={config.activation!r}": kind == "dinov2"
        and _other_mlp(config),
        f"{config.position} positions in layers": kind != "beit"
        and config.position_place not in ("", "stem"),
        "biases of keys": kind == "beit" and config.qkv_bias and config.key_bias,
        f"{config.position} positions beside rotary ones": kind == "dinov3_vit"
        and config.position != "none",
        "weighted_layers": config.weighted_layers,
        "QKV projections without biases": kind in ("clip", "siglip", "beit")
        and not config.qkv_bias,
        "registers": kind in ("clip", "siglip", "beit") and config.registers,
        "patches with a bias before a norm": kind == "clip" and config.patch_bias,
    }
    missing = [part for part, lacking in lacks.items() if lacking]
    missing += vit_flax.parts_beside(config, _PARTS[kind])
    return f"transformers' {name} has no {', no '.join(missing)}" if missing else ""


def _refused_head(config: PublishedViTConfig, kind: str) -> str:
    """Why no class of transformers reads the tokens as a model does; '' if one does."""
    reads = f"pool={config.pool!r} and last_norm={config.last_norm!r}"
    head = "with a head" if config.num_classes else "without a head"
    match kind:
        case "dinov2":
            known = ("token", "token_mean", "mean") if config.num_classes else ("token",)
            if config.pool not in known or not config.has_class_token:
                return f"transformers' DINOv2 has no pool={config.pool!r} {head}"
        case "dinov3_vit":
            if config.num_classes:
                return "transformers has no classifier with DINOv3's network"
            if config.pool != "token":
                reason = f"transformers' DINOv3 has no pool={config.pool!r}"
                options = "--model=pool=token --model=keep_class_token=False"
                read = f": to read the class token instead, pass {options}"
                return reason + (read if config.pool == "mean" and config.has_class_token else "")
        case "clip":
            wanted = ("mean", "none") if config.num_classes else ("token", "pooled")
            if (config.pool, config.last_norm) != wanted or not config.has_class_token:
                return (
                    f"transformers' CLIP {head} reads pool={wanted[0]!r} and last_norm={wanted[1]!r} beside a class "
                    f"token, this model {reads}: fine-tune with these"
                )
        case "beit":
            known = {("mean", "pooled"), ("token", "tokens")}
            if (config.pool, config.last_norm) not in known or not config.has_class_token:
                return f"transformers' BEiT reads no {reads}"
        case "siglip":
            wanted = "mean" if config.num_classes else "map"
            if config.pool != wanted:
                return f"transformers' SigLIP {head} reads pool={wanted!r}, this model {reads}: fine-tune with that"
    return ""


def _other_mlp(config: PublishedViTConfig) -> bool:
    """Whether the MLPs are none of DINOv2's, whose size follows from the width."""
    if config.gated_mlp:
        return config.mlp_dim != gated_size(4 * config.width) or config.activation != "silu"
    return bool(config.mlp_dim % config.width)


def expressed(
    config: PublishedViTConfig, params: dict, kind: str
) -> tuple[PublishedViTConfig, dict]:
    """An equivalent model that the kind can express: learned positions with a class row, and for DINOv2 a head of the
    class token and the mean.
    """
    if kind in ("dinov3_vit", "beit"):
        return config, params
    config, params = vit_flax.with_learned_position(config, params)
    config, params = vit_flax.with_class_row(config, params)
    if not kind.startswith("dinov2") or not config.num_classes or config.pool == "token_mean":
        return config, params
    kernel = np.asarray(params["head"]["kernel"])
    halves = [kernel, np.zeros_like(kernel)]  # of the class token and of the mean
    halves = halves if config.pool == "token" else halves[::-1]
    head = params["head"] | {"kernel": np.concatenate(halves)}
    return dataclasses.replace(config, pool="token_mean"), params | {"head": head}


def config_json(config: PublishedViTConfig, kind: str) -> dict[str, Any]:
    """What config.json says of a new file."""
    if kind.startswith("dinov2"):
        return _dinov2(config, kind)
    if kind == "beit":
        return _beit(config)
    metadata = vit_config_json.config_fields(config) | {"intermediate_size": config.mlp_dim}
    for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "qkv_bias"):
        metadata.pop(name)
    metadata["attention_dropout"] = config.attention_dropout
    if kind == "dinov3_vit":
        return metadata | {
            "architectures": ["DINOv3ViTModel"],
            "model_type": kind,
            "rope_theta": config.rope_theta,
            "query_bias": config.qkv_bias,
            "key_bias": config.qkv_bias and config.key_bias,
            "value_bias": config.qkv_bias,
            "proj_bias": config.projection_bias,
            "mlp_bias": config.projection_bias,
            "use_gated_mlp": config.gated_mlp,
            "num_register_tokens": config.registers,
            "layerscale_value": config.layer_scale_init,
        }
    vision = f"{kind}_vision_model"
    if kind == "siglip":
        metadata["vision_use_head"] = config.pool == "map"
    name = {"clip": "CLIP", "siglip": "Siglip"}[kind]
    if not config.num_classes:
        return metadata | {"architectures": [f"{name}VisionModel"], "model_type": vision}
    return {
        "architectures": [f"{name}ForImageClassification"],
        "model_type": kind,
        "vision_config": metadata | {"model_type": vision},
    }


def _beit(config: PublishedViTConfig) -> dict[str, Any]:
    """`config_json` of BEiT."""
    shared = config.position_place == "shared"
    fields = vit_config_json.config_fields(config)
    fields.pop("qkv_bias")
    return fields | {
        "architectures": [f"Beit{'ForImageClassification' if config.num_classes else 'Model'}"],
        "model_type": "beit",
        "intermediate_size": config.mlp_dim,
        "layer_scale_init_value": config.layer_scale_init if config.layer_scale == "all" else 0.0,
        "use_relative_position_bias": not shared,
        "use_shared_relative_position_bias": shared,
        "use_mean_pooling": config.pool == "mean",
    }


def _dinov2(config: PublishedViTConfig, kind: str) -> dict[str, Any]:
    """`config_json` of DINOv2."""
    registers = {"num_register_tokens": config.registers}
    name = "Dinov2WithRegisters" if config.registers else "Dinov2"
    return vit_config_json.config_fields(config) | {
        "architectures": [f"{name}{'ForImageClassification' if config.num_classes else 'Model'}"],
        "model_type": kind,
        "mlp_ratio": 4 if config.gated_mlp else config.mlp_dim // config.width,
        "use_swiglu_ffn": config.gated_mlp,
        "layerscale_value": config.layer_scale_init,
        **(registers if config.registers else {"use_mask_token": False}),
    }
