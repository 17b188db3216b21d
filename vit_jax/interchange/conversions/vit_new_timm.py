"""New files for timm: which of its architectures computes a ViT, and with which arguments."""

import math
from collections.abc import Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import vit_arguments, vit_beit, vit_naflex
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

POOLS = {ours: theirs for theirs, ours in vit_arguments.POOLS.items()}
_ROPES = {ours: theirs for theirs, ours in vit_arguments.ROPES.items()}
# Layers and the epsilon of norms are no JSON: architectures that have them, by class, norm, its epsilon, whether
# blocks norm what they give, and the MLP's names (see `vit_timm.Timm.layout`) or several branches.
_BASES = {
    ("vit", "layer", 1e-6, False, ""): "vit_base_patch16_224",
    ("vit", "layer", 1e-6, False, "branches"): "vit_base_patch16_18x2_224",
    ("vit", "layer", 1e-5, False, ""): "vit_base_patch16_clip_224",
    ("vit", "layer", 1e-6, False, "packed"): "vit_giant_patch14_dinov2",
    ("vit", "rms", 1e-5, False, "separate"): "aimv2_large_patch14_224",
    ("vit", "layer", 1e-6, True, ""): "vit_base_patch16_rpn_224",
    ("eva", "layer", 1e-6, False): "eva_giant_patch14_224",
    ("eva", "layer", 1e-5, False): "vit_pe_core_base_patch16_224",
    ("eva", "rms", 1e-6, False): "vit_base_patch16_sapiens2",
    ("eva", "layer", 1e-6, True): "eva02_enormous_patch14_clip_224",
}


def architecture(
    config: PublishedViTConfig, layout: Mapping[str, Any], metadata: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """`TimmConversion.architecture` for such arguments."""
    metadata = metadata | {"patch_size": config.patch}
    if layout.get("naflex"):
        own = {"img_size", "no_embed_class", "scale_attn_norm"}
        metadata = {name: value for name, value in metadata.items() if name not in own}
        return "naflexvit_base_patch16_gap", metadata | vit_naflex.arguments(config)
    if config.position == "bias2d":
        return "beit_base_patch16_224", metadata
    if config.distilled:
        return "deit_base_distilled_patch16_224", metadata
    kind = (config.norm, config.epsilon, config.norm_after)
    eva = is_eva(config, layout)
    blocks = ("branches" if config.block_branches else "") + (layout.get("mlp") or "")
    base = _BASES.get(("eva", *kind) if eva else ("vit", *kind, blocks))
    unscaled = eva and config.norm == "rms" and config.layer_scale == "none"
    if base is None or unscaled or (config.patch_norm and "aimv2" not in base):
        raise CheckpointError(
            f"timm builds no model with norm={config.norm!r}, epsilon={config.epsilon:g}, norm_after="
            f"{config.norm_after}, gated_mlp={config.gated_mlp}, block_branches={config.block_branches} and patch_norm="
            f"{config.patch_norm} by a name: write a .safetensors file"
        )
    return base, metadata


def arguments(config: PublishedViTConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of timm's VisionTransformer or Eva, except patch size and what is no JSON."""
    if config.representation:
        raise CheckpointError(
            "timm has had no layer before the head since version 0.8: write a .safetensors file"
        )
    hidden = config.mlp_dim * (
        2 if not is_eva(config, layout) and layout.get("mlp") == "packed" else 1
    )
    if config.patch_bias == config.pre_norm:
        raise CheckpointError(
            "timm's patch embeddings have a bias just where there is no norm before the blocks: write a "
            ".safetensors file"
        )
    common = {
        "img_size": timm_size(config.image_size),
        "embed_dim": config.width,
        "depth": config.depth,
        "num_heads": config.heads,
        "mlp_ratio": ratio(hidden, config.width),
        "global_pool": POOLS[config.pool],
        "qkv_bias": config.qkv_bias,
    }
    if config.position == "bias2d":
        return common | vit_beit.beit_arguments(config)
    common |= {
        "class_token": config.has_class_token,
        "qk_norm": config.qk_norm,
        "no_embed_class": not config.prefix,
    }
    return common | (_eva_arguments if is_eva(config, layout) else _vit_arguments)(config, layout)


def _vit_arguments(config: PublishedViTConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
    return ({"attn_layer": "diff"} if config.differential else {}) | {
        "init_values": config.layer_scale_init if config.layer_scale != "none" else 0,
        "fc_norm": config.last_norm == "pooled",
        "final_norm": config.last_norm != "none",
        "reg_tokens": config.registers,
        "pre_norm": config.pre_norm,
        "proj_bias": config.projection_bias,
        "scale_attn_norm": config.attention_inner_norm,
        "scale_mlp_norm": config.mlp_inner_norm,
        "pool_include_prefix": config.pool_prefix,
        "act_layer": config.activation,
    }


def _eva_arguments(config: PublishedViTConfig, layout: Mapping[str, Any]) -> dict[str, Any]:
    if config.activation != ("silu" if config.gated_mlp else "gelu") or not config.projection_bias:
        raise CheckpointError(
            "timm's Eva has the activation gelu, or with a gate silu, and biases: write a .safetensors file"
        )
    if config.tokens_with_position and config.pool_prefix != (config.pool == "map"):
        raise CheckpointError(
            "timm's Eva pools the class token by attention, and leaves it out of a mean: write a .safetensors file"
        )
    rope = config.rope != "none"
    columns = config.rope == "mixed" or layout.get("rope_columns_first")
    scaled = {} if config.layer_scale == "none" else {"init_values": config.layer_scale_init}
    return scaled | {
        "num_reg_tokens": config.registers,
        "qkv_fused": layout.get("qkv") != "separate",
        "attn_type": "rope" if config.key_bias and config.qkv_bias else "eva",
        "swiglu_mlp": config.gated_mlp,
        "swiglu_align_to": int(layout.get("mlp") == "separate"),
        "scale_mlp": config.mlp_inner_norm,
        "scale_attn_inner": config.attention_inner_norm,
        "attn_only_layer_scale": config.layer_scale == "attention",
        "use_abs_pos_emb": config.position != "none",
        "use_rot_pos_emb": rope,
        "rope_type": _ROPES.get(config.rope, "cat"),
        "rope_temperature": config.rope_theta,
        "rope_grid_offset": config.rope_offset,
        "rope_grid_indexing": "xy" if columns else "ij",
        "rope_rotate_half": config.rope == "centred",
        "ref_feat_shape": list(config.rope_grid or config.grid),
        "use_pre_transformer_norm": config.pre_norm,
        "use_post_transformer_norm": config.last_norm == "tokens",
        "use_fc_norm": config.last_norm == "pooled",
        "use_post_norm": config.norm_after,
        "attn_pool_num_heads": config.pool_heads,
        "attn_pool_mlp_ratio": ratio(config.pool_mlp_dim, config.width),
        "num_kv_heads": config.heads,
    }


def is_eva(config: PublishedViTConfig, layout: Mapping[str, Any] | None = None) -> bool:
    """Whether it is timm's Eva that can compute a model."""
    if layout and (layout.get("layer_scale") == "gamma" or layout.get("qkv") == "separate"):
        return True
    only_there = config.map_heads or config.map_mlp_dim or config.layer_scale == "attention"
    return bool(config.rope != "none" or not config.key_bias or only_there)


def timm_size(size: sizes.Size) -> int | list[int]:
    """An image size as timm has it in JSON."""
    return size if isinstance(size, int) else list(size)


def ratio(hidden: int, width: int) -> float:
    """The factor that timm multiplies `width` with and rounds down, to get `hidden`."""
    factor = hidden / width
    return factor if int(width * factor) == hidden else math.nextafter(factor, math.inf)
