"""Hugging Face's networks that are ViTs under other names: DINOv2 with and without registers, DINOv3,
MAE's encoder, BEiT and data2vec-vision, I-JEPA, ViT-MSN, AIMv2, and the image towers of CLIP, SigLIP and SigLIP 2
(NaFlex at its own number of patches) and TIPSv2.

Left out are what only pre-training needs, text towers, and CLIP's `visual_projection`, which has no
bias. Files are written again as they were read; new ones are in `vit_new_towers`.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import vit_beit, vit_config_json
from vit_jax.interchange.conversions.contract import DetectedModel, Shapes
from vit_jax.interchange.conversions.skips import Skip
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

Fields = dict[str, Any]

_DINOV2 = {"mlp_ratio": 4, "patch_size": 14, "use_swiglu_ffn": False}
_SIGLIP = {"hidden_act": "gelu_pytorch_tanh", "vision_use_head": True}
_CLIP = {"hidden_act": "quick_gelu", "layer_norm_eps": 1e-5, "patch_size": 32}
_BEIT = {
    "layer_norm_eps": 1e-12,
    "layer_scale_init_value": 0.1,
    "use_absolute_position_embeddings": False,
    "use_relative_position_bias": False,
    "use_shared_relative_position_bias": False,
    "use_mean_pooling": True,
}
_TIPS = _DINOV2 | {"image_size": 448, "num_register_tokens": 1}
_AIM = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8,
    "patch_size": 14, "hidden_act": "silu", "rms_norm_eps": 1e-5, "qkv_bias": False, "mlp_bias": False,
    "use_head": True, "is_native": False,
}  # fmt: skip
# What transformers takes where config.json says nothing, by its `model_type`.
DEFAULTS: dict[str, Fields] = {
    "dinov2": _DINOV2,
    "dinov2_with_registers": _DINOV2 | {"patch_size": 16, "num_register_tokens": 4},
    "dinov3_vit": {
        "hidden_size": 384,
        "intermediate_size": 1536,
        "num_attention_heads": 6,
        "layer_norm_eps": 1e-5,
        "rope_theta": 100.0,
        "query_bias": True,
        "key_bias": False,
        "value_bias": True,
        "proj_bias": True,
        "mlp_bias": True,
        "use_gated_mlp": False,
        "num_register_tokens": 0,
    },
    "vit_mae": {"layer_norm_eps": 1e-12},
    "vit_msn": {},
    "ijepa": {"layer_norm_eps": 1e-12},
    "beit": _BEIT,
    "data2vec-vision": _BEIT,
    "tipsv2": _TIPS,
    "tipsv2_vision_model": _TIPS,
    "aimv2": _AIM,
    "aimv2_vision_model": _AIM,
    "siglip": _SIGLIP,
    "siglip_vision_model": _SIGLIP,
    "siglip2": _SIGLIP | {"num_patches": 256},
    "siglip2_vision_model": _SIGLIP | {"num_patches": 256},
    "clip": _CLIP,
    "clip_vision_model": _CLIP,
}
_PREFIXES = (
    "", "vision_model.", "dinov2.", "dinov2_with_registers.", "vit.", "model.", "beit.", "data2vec_vision.", "ijepa.",
    "vision_encoder.",
)  # fmt: skip
# What a prefix is followed by, of the kernel that embeds patches.
_PATCHES = (
    "embeddings.patch_embeddings.projection", "embeddings.patch_embedding", "embeddings.patch_embeddings",
    "embeddings.patch_embed", "patch_embed.proj",
)  # fmt: skip
_ANY_GRID = ("dinov3_vit", "ijepa", "vit_msn")  # which images need not be square for


def _place_numbers(stored: np.ndarray, config: PublishedViTConfig) -> np.ndarray:
    return np.arange(stored.size).reshape(stored.shape)


def _no_rows(stored: np.ndarray, config: PublishedViTConfig) -> np.ndarray:
    return np.zeros((1, 0, config.width))


def _frequencies(stored: np.ndarray, config: PublishedViTConfig) -> np.ndarray:
    size = config.width // config.heads // 4
    return config.rope_theta ** (-np.arange(size) / size)


# Not part of the network, beside what `_LEFT_OUT` has of its kind.
_BESIDE = (
    Skip(r"(.*\.)?mask_token", "stands for patches that pre-training hides, and no image has any"),
    Skip(r"decoder\..*", "predicts hidden patches", "a decoder"),
    Skip(r"text_(model|encoder)\..*", "reads texts, not images", "the text tower"),
    Skip("logit_(scale|bias)|temperature", "of the loss between images and texts", "the text tower"),
    Skip(r"(text|visual)_projection\.weight", "leads to where images meet texts", "the text tower"),
    Skip(
        r"(.*\.)?embeddings\.position_ids", "rows of the table in their order, 0, 1, …",
        computed=_place_numbers,
    ),
    Skip(
        r"(.*\.)?rope_embeddings\.inv_freq", "frequencies of rotary positions, which follow from rope_theta",
        computed=_frequencies,
    ),
)  # fmt: skip
_NO_REGISTERS = Skip(r"(.*\.)?register_tokens", "a table of no registers", computed=_no_rows)
_LEFT_OUT = {
    "dinov3_vit": (Skip(r"classifier\..*", "transformers has no class that reads it", "a head"),),
    "siglip": (Skip(r"(.*\.)?head\..*", "its classifier reads the mean of the patches", "a head"),),
}  # fmt: skip


def recognise(shapes: Shapes, metadata: Mapping[str, Any]) -> DetectedModel:
    """The model that a file holds, of a `model_type` in `DEFAULTS`."""
    kind, value = metadata["model_type"], _with_defaults(metadata)
    nested = [name for section in _sections(metadata).values() for name in section]
    prefixes = [p for p in _PREFIXES for n in _PATCHES if f"{p}{n}.weight" in shapes]
    if not prefixes:
        raise KeyError("embeddings.patch_embedding.weight")
    layout = {"kind": kind.removesuffix("_vision_model"), "prefix": prefixes[0]}
    options = vit_config_json.options(value) | {"num_classes": 0}
    details_of = {
        "dinov2": _dinov2,
        "dinov2_with_registers": _dinov2,
        "dinov3_vit": _dinov3,
        "siglip": _siglip,
        "siglip2": _siglip,
        "clip": _clip,
        "vit_msn": _msn,
        "ijepa": _ijepa,
        "beit": _beit,
        "data2vec-vision": _beit,
        "tipsv2": _dinov2,
        "aimv2": _aim,
    }.get(layout["kind"], _plain)
    more, left_out = details_of(shapes, value, prefixes[0])
    if not more.get("registers"):  # DINOv3 keeps a table of none.
        left_out = (*left_out, _NO_REGISTERS)
    # NaFlex has a number of patches in place of a size.
    sized = {"image_size"} if "num_patches" in value else set()
    sized |= {"layer_norm_eps"} if "rms_norm_eps" in value else set()
    assumed = vit_config_json.assumed(
        {*metadata, *nested, *sized}, {"rope_theta": "rope_theta"} if "rope" in more else None
    )
    return DetectedModel(options | more, layout, left_out=(*_BESIDE, *left_out), assumed=assumed)


def changed_fields(config: PublishedViTConfig, metadata: Mapping[str, Any]) -> Fields:
    """What a config.json says otherwise of a model that was read with it and changed since, such as by another image
    size.

    Raises:
      CheckpointError: transformers cannot compute that.
    """
    value = _with_defaults(metadata)
    fields = vit_config_json.changed_fields(config, value)
    if "image_size" in fields and "num_patches" in value:
        fields["num_patches"] = math.prod(config.grid)
        del fields["image_size"]
    sections = _sections(metadata) if fields else {}
    return {name: section | fields for name, section in sections.items()} or fields


def check_square(config: PublishedViTConfig, kind: str) -> None:
    """Raises `CheckpointError` for images that the network of this kind in transformers does not take."""
    if kind not in _ANY_GRID and len(set(config.height_width)) > 1:
        raise CheckpointError(
            f"transformers computes positions of {kind} only for square images, and this model is for "
            f"{sizes.size_text(config.image_size)} pixels: convert with --to=timm, or to orbax"
        )


def _with_defaults(metadata: Mapping[str, Any]) -> Fields:
    """All that a config.json says, of a tower in that of image and text what its section says."""
    value = vit_config_json.USUAL | {"layer_norm_eps": 1e-6} | DEFAULTS[metadata["model_type"]]
    value |= dict(metadata)
    for section in _sections(metadata).values():
        value |= section
    return value | ({"layer_norm_eps": value["rms_norm_eps"]} if "rms_norm_eps" in value else {})


def _sections(metadata: Mapping[str, Any]) -> dict[str, Fields]:
    """The sections of a config.json that are about the tower; the later overrides."""
    names = ("vision_config", "vision_config_dict")
    return {name: metadata[name] for name in names if metadata.get(name)}


def _plain(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    return {"qkv_bias": value["qkv_bias"]}, ()


def _msn(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    return _plain(shapes, value, prefix)[0] | _classes(shapes), ()


def _ijepa(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    return _msn(shapes, value, prefix)[0] | {"pool": "mean"}, ()


def _classes(shapes: Shapes) -> Fields:
    return {"num_classes": shapes.get("classifier.bias", (0,))[0]}


def _beit(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    kinds = {
        ("learned", "stem"): value["use_absolute_position_embeddings"],
        ("bias2d", "layers"): value["use_relative_position_bias"],
        ("bias2d", "shared"): value["use_shared_relative_position_bias"],
    }
    positions = [kind for kind, used in kinds.items() if used] or [("none", "auto")]
    if len(positions) > 1:
        raise CheckpointError(
            "positions of several kinds are not supported: only one of use_absolute_position_embeddings, "
            "use_relative_position_bias and use_shared_relative_position_bias"
        )
    if positions[0][0] == "bias2d" and len(set(sizes.height_width(value["image_size"]))) > 1:
        raise CheckpointError(
            f"image_size {value['image_size']}: transformers takes a table of biases that is not square as one of "
            "columns before rows, and computes other distances than it has: only square images are supported"
        )
    mean = value["use_mean_pooling"]
    norms = ("tokens", f"{prefix}layernorm.weight"), ("pooled", f"{prefix}pooler.layernorm.weight")
    options = {
        "position": positions[0][0],
        "position_at": positions[0][1],
        "key_bias": False,
        "layer_scale": "all" if value["layer_scale_init_value"] > 0 else "none",
        "pool": "mean" if mean else "token",
        "keep_class_token": mean,
        "last_norm": next((at for at, name in norms if name in shapes), "none"),
    }
    return options | _classes(shapes), vit_beit.LEFT_OUT


def _aim(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    if value["use_head"] or value["is_native"] or value["qkv_bias"] != value["mlp_bias"]:
        raise CheckpointError(
            "AIMv2 is read with use_head = false, is_native = false and the same qkv_bias and mlp_bias; this one says "
            f"{value['use_head']}, {value['is_native']}, {value['qkv_bias']} and {value['mlp_bias']}"
        )
    return {
        "norm": "rms",
        "patch_norm": True,
        "gated_mlp": True,
        "qkv_bias": value["qkv_bias"],
        "projection_bias": value["mlp_bias"],
        "pool": "mean",
    }, ()


def _dinov2(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    hidden = int(value["hidden_size"] * value["mlp_ratio"])
    options = {"layer_scale": "all", "qkv_bias": value["qkv_bias"], "mlp_dim": hidden}
    if value["use_swiglu_ffn"]:
        options |= {"gated_mlp": True, "activation": "silu", "mlp_dim": gated_size(hidden)}
    if "classifier.bias" in shapes:
        options |= {"pool": "token_mean", "num_classes": shapes["classifier.bias"][0]}
    return options | {"registers": value.get("num_register_tokens", 0)}, ()


def _dinov3(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    biases = tuple(bool(value[f"{name}_bias"]) for name in ("query", "key", "value"))
    known = {(True, True, True), (True, False, True), (False, False, False)}
    if biases not in known or value["proj_bias"] != value["mlp_bias"]:
        raise CheckpointError(f"biases of queries, keys, values {biases} are not supported")
    options = {
        "position": "none",
        "rope": "centred",
        "rope_theta": float(value["rope_theta"]),
        "registers": value["num_register_tokens"],
        "layer_scale": "all",
        "qkv_bias": biases[0],
        "key_bias": biases[1] or not biases[0],
        "projection_bias": value["proj_bias"],
        "gated_mlp": value["use_gated_mlp"],
    }
    return options, _LEFT_OUT["dinov3_vit"]


def _siglip(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    options: Fields = {"pool": "map"}
    if "classifier.weight" in shapes or f"{prefix}head.probe" not in shapes:
        options = {"pool": "mean", "num_classes": shapes.get("classifier.bias", (0,))[0]}
    if "num_patches" in value:
        (patch,) = {value["patch_size"]}
        options["image_size"] = math.isqrt(value["num_patches"]) * patch
    return options, () if options["pool"] == "map" else _LEFT_OUT["siglip"]


def _clip(shapes: Shapes, value: Fields, prefix: str) -> tuple[Fields, tuple[Skip, ...]]:
    options = {"pre_norm": True, "patch_bias": False, "last_norm": "pooled"}
    if "classifier.weight" not in shapes:
        return options, ()
    classes = shapes["classifier.bias"][0]
    options |= {"pool": "mean", "keep_class_token": True, "last_norm": "none"}
    return options | {"num_classes": classes}, ()


def gated_size(hidden: int) -> int:
    """The hidden size of DINOv2's gated MLPs, from that of others."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8
