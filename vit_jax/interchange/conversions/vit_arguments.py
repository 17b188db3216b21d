"""The arguments of timm's VisionTransformer, Eva, Beit and NaFlexVit, as options of our ViT."""

from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import vit_beit, vit_naflex

Options = dict[str, Any]

ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_erf": "gelu",
    "gelu_tanh": "gelu_tanh",
    "quick_gelu": "quick_gelu",
    "silu": "silu",
    "swish": "silu",
}
POOLS = {"token": "token", "avg": "mean", "map": "map"}
ROPES = {"cat": "axial", "dinov3": "centred", "mixed": "mixed"}
NORMS = {"LayerNorm": "layer", "layernorm": "layer", "RmsNorm": "rms", "rmsnorm": "rms"}
VIT, DISTILLED, EVA = "VisionTransformer", "VisionTransformerDistilled", "Eva"
BEIT, NAFLEX = "Beit", "NaFlexVit"
KINDS = (VIT, DISTILLED, EVA, BEIT, NAFLEX)
# Options that no tensor shows, and what timm takes by default.
NOT_IN_TENSORS = {
    "heads": None,
    "activation": "gelu",
    "epsilon": 1e-6,
    "pool": None,
    "pool_prefix": False,
    "map_heads": 0,
    "norm_after": False,
    "rope": "none",
    "rope_theta": 10_000.0,
    "rope_grid": (),
    "rope_offset": 0.0,
    "rope_columns_first": False,
    "native_resize": "bilinear",
    "native_aspect": False,
}
OF_NAFLEX = ("native_resize", "native_aspect")  # those of them that only NaFlexVit has


def from_arguments(kind: str, arguments: Mapping[str, Any]) -> Options:
    """The options of timm's VisionTransformer, Eva, Beit or NaFlexVit with these arguments. `rope_columns_first` says
    that columns turn the first channels.

    Raises:
      CheckpointError: an argument that changes what is computed is not supported.
    """
    metadata = dict(arguments)
    used: set[str] = set()

    def take(name: str, default):
        used.add(name)
        value = metadata.get(name)
        return default if value is None else value

    eva, beit, naflex = kind == EVA, kind == BEIT, kind == NAFLEX
    width, depth = take("embed_dim", 768), take("depth", 12)
    heads = take("num_heads", 12)
    pool = take("global_pool", "avg" if eva or beit else "map" if naflex else "token")
    class_token = take("class_token", not naflex)
    registers = take("num_reg_tokens" if eva else "reg_tokens", 0)
    norm = take("norm_layer", "LayerNorm")
    activation = take("act_layer", "gelu")
    gated, hidden = _mlp(take, eva or beit, width)
    activation = "silu" if (eva or beit) and gated else activation
    known = [(pool, POOLS, "global_pool"), (activation, ACTIVATIONS, "act_layer")]
    known += [(norm, NORMS, "norm_layer")]
    for value, names, name in known:
        if value not in names:
            raise CheckpointError(
                f"timm's {name}={value!r} is not supported; {', '.join(names)} are"
            )
    options = {
        "patch": take("patch_size", 16),
        "depth": depth,
        "width": width,
        "mlp_dim": hidden,
        "heads": heads,
        "activation": ACTIVATIONS[activation],
        "epsilon": take("norm_eps", 1e-6),
        "norm": NORMS[norm],
        "pool": POOLS[pool],
        "keep_class_token": class_token and pool != "token",
        "distilled": kind == DISTILLED,
        "registers": registers,
        "gated_mlp": gated,
        "qk_norm": take("qk_norm", False),
        "qkv_bias": take("qkv_bias", True),
        "projection_bias": take("proj_bias", True),
        "parallel": False,
        "block_branches": 0,
        "differential": False,
    }
    if naflex:
        options |= vit_naflex.options_from_arguments(take, options) | _no_rope()
    else:
        if beit:
            options |= vit_beit.options_from_arguments(take, options) | _no_rope()
        else:
            options |= (_eva if eva else _vit)(take, options, metadata)
        options |= {name: NOT_IN_TENSORS[name] for name in OF_NAFLEX}
    if options.get("map_mlp_dim") == options["mlp_dim"]:
        options["map_mlp_dim"] = 0
    unknown = {n: v for n, v in metadata.items() if n not in used | _HARMLESS and v is not None}
    if unknown:
        listed = ", ".join(f"{name}={value!r}" for name, value in unknown.items())
        raise CheckpointError(f"timm's {listed} is not supported")
    return options


# Arguments of training, and of what is read elsewhere.
_HARMLESS = {
    "img_size", "in_chans", "num_classes", "drop_rate", "pos_drop_rate", "patch_drop_rate", "proj_drop_rate",
    "attn_drop_rate", "drop_path_rate", "weight_init", "fix_init", "head_init_scale", "dynamic_img_size",
    "strict_img_size", "rope_shift_coords", "rope_jitter_coords", "rope_rescale_coords",
}  # fmt: skip


def _mlp(take, of_eva: bool, width: int) -> tuple[bool, int]:
    """Whether the MLPs have a gate, and the size of their hidden layer."""
    ratio = 4.0 if (given := take("mlp_ratio", 4.0)) is None else given
    hidden = int(width * ratio)
    if of_eva:
        aligned = take("swiglu_align_to", 0)
        gated = take("swiglu_mlp", False)
        return gated, hidden + (-hidden % aligned if aligned and gated else 0)
    layer = take("mlp_layer", "Mlp")
    if layer not in ("Mlp", "SwiGLU", "GluMlp", "SwiGLUPacked"):
        raise CheckpointError(f"timm's mlp_layer={layer!r} is not supported")
    packed = layer in ("GluMlp", "SwiGLUPacked")
    return layer != "Mlp", hidden // 2 if packed else hidden


_BLOCKS = (
    "Block", "ResPostBlock", "ParallelScalingBlock", "ParallelThingsBlock", "DiffParallelScalingBlock"
)  # fmt: skip


def _vit(take, options: Options, metadata: Mapping[str, Any]) -> Options:
    """What VisionTransformer has in its own way."""
    pooled = options["pool"] == "mean" if (norm := take("fc_norm", None)) is None else norm
    block = take("block_fn", "Block")
    if block not in _BLOCKS:
        raise CheckpointError(f"timm's block_fn={block!r} is not supported")
    after = block == "ResPostBlock"
    pre_norm, embed_norm = take("pre_norm", False), take("embed_norm_layer", None)
    scaled = take("init_values", 0) and not after
    own = not take("no_embed_class", False)
    if take("pos_embed", "learn") != "learn":
        raise CheckpointError(f"timm's pos_embed={metadata['pos_embed']!r} is not supported")
    attention = take("attn_layer", "attn")
    for name, usual in (
        ("attn_layer", ("attn", "diff")),
        ("embed_layer", ("PatchEmbed", "ResNet")),
    ):
        if (value := take(name, usual[0])) not in usual:
            raise CheckpointError(f"timm's {name}={value!r} is not supported")
    return {
        "key_bias": True,
        "attention_inner_norm": take("scale_attn_norm", False),
        "mlp_inner_norm": take("scale_mlp_norm", False),
        "layer_scale": "all" if scaled else "none",
        "norm_after": after,
        "parallel": block.endswith("ParallelScalingBlock"),
        "block_branches": 2 if block == "ParallelThingsBlock" else 0,
        "differential": attention == "diff" or block == "DiffParallelScalingBlock",
        "pre_norm": pre_norm,
        "patch_bias": not pre_norm,
        "patch_norm": bool(embed_norm),
        "last_norm": ("pooled" if pooled else "tokens") if take("final_norm", True) else "none",
        "pool_prefix": take("pool_include_prefix", False),
        "map_heads": 0,
        "position": "learned",
        "position_of_class": own,
        "position_of_registers": bool(own and options["registers"]),
        **_no_rope(),
    }


def _eva(take, options: Options, metadata: Mapping[str, Any]) -> Options:
    """What Eva has in its own way."""
    take("num_kv_heads", None)  # `vit_rearranged` makes as many as queries have
    attention = take("attn_type", "eva")
    rope = take("use_rot_pos_emb", False)
    pooled = options["pool"] == "mean" if (norm := take("use_fc_norm", None)) is None else norm
    kept = not pooled if (norm := take("use_post_transformer_norm", None)) is None else norm
    after = take("use_post_norm", False)
    scaled = metadata.get("init_values") is not None and not after
    only_attention = take("attn_only_layer_scale", False)
    own, table = not take("no_embed_class", False), take("use_abs_pos_emb", True)
    pre_norm = take("use_pre_transformer_norm", False)
    take("init_values", None), take("qkv_fused", True)  # Tensors tell them.
    map_heads, map_ratio = take("attn_pool_num_heads", 0), take("attn_pool_mlp_ratio", 0)
    if pooled and kept:
        raise CheckpointError("norms of both the tokens and what is pooled are not supported")
    options = {
        "key_bias": attention == "rope" or not options["qkv_bias"],
        "attention_inner_norm": take("scale_attn_inner", False),
        "mlp_inner_norm": take("scale_mlp", False),
        "layer_scale": ("attention" if only_attention else "all") if scaled else "none",
        "norm_after": after,
        "pre_norm": pre_norm,
        "patch_bias": not pre_norm,
        "patch_norm": False,
        "last_norm": "pooled" if pooled else "tokens" if kept else "none",
        "pool_prefix": options["pool"] == "map",
        "map_heads": map_heads if map_heads != options["heads"] else 0,
        "map_mlp_dim": int(options["width"] * map_ratio) if map_ratio else 0,
        "position": "learned" if table else "none",
        "position_of_class": own,
        "position_of_registers": bool(table and own and options["registers"]),
    }
    return options | (_rope(take) if rope else _no_rope(take))


def _no_rope(take=None) -> Options:
    for name in _ROPE_ARGUMENTS if take else ():
        take(name, None)
    return {name: NOT_IN_TENSORS[name] for name in NOT_IN_TENSORS if name.startswith("rope")}


_ROPE_ARGUMENTS = (
    "use_rot_pos_emb", "rope_type", "rope_temperature", "ref_feat_shape", "rope_grid_offset", "rope_grid_indexing",
    "rope_rotate_half",
)  # fmt: skip


def _rope(take) -> Options:
    kind, columns = take("rope_type", "cat"), take("rope_grid_indexing", "ij") == "xy"
    grid = take("ref_feat_shape", None)
    half = take("rope_rotate_half", False)
    unsupported = (
        kind not in ROPES or half != (kind == "dinov3") or (kind == "mixed" and not columns)
    )
    if unsupported or (kind == "dinov3" and columns):
        raise CheckpointError(
            f"timm's rope_type={kind!r} with rope_rotate_half={half} and rope_grid_indexing="
            f"{'xy' if columns else 'ij'!r} is not supported"
        )
    axial, offset = kind == "cat", take("rope_grid_offset", 0.0)
    if offset and not axial:
        raise CheckpointError(
            f"timm's rope_grid_offset={offset} with rope_type={kind!r} is not supported, only with 'cat'"
        )
    return {
        "rope": ROPES[kind],
        "rope_theta": float(take("rope_temperature", 10_000.0)),
        "rope_grid": tuple([grid] * 2 if isinstance(grid, int) else grid or ()) if axial else (),
        "rope_offset": float(offset) if axial else 0.0,
        "rope_columns_first": axial and columns,
    }
