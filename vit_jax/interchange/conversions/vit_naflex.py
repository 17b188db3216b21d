"""timm's NaFlexVit, which takes images of sizes of their own: what it has otherwise than timm's VisionTransformer. Its
patches are embedded by a linear layer, and its table of positions keeps rows and columns apart.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import pytorch
from vit_jax.interchange.conversions.contract import Shapes
from vit_jax.interchange.conversions.rules import Rule, reshaped
from vit_jax.models import published
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

KERNEL = "patch_embed.proj.weight"
# From its names to those of VisionTransformer.
RENAMED = (
    (r"^embeds\.(cls_token|reg_token|pos_embed|pos_embed_x|pos_embed_y)$", r"\1"),
    (r"^embeds\.(proj|norm)\.", r"patch_embed.\1."),
)
_THEIRS = (
    *("cls_token", "reg_token", "pos_embed", "pos_embed_x", "pos_embed_y"), KERNEL, "patch_embed.proj.bias",
)  # fmt: skip
# Arguments that change what is computed, with the only values that are read.
_ONLY = {
    "pos_embed_align_corners": False, "pos_embed_use_grid_sample": False, "pos_embed_antialias": True,
    "embed_proj_type": "linear", "patchify_channels_last": True, "attn_type": "standard", "attn_gated": False,
    "swiglu_mlp": False, "attn_only_layer_scale": False, "qkv_fused": True,
}  # fmt: skip
_TRAINING = (
    "dynamic_img_pad", "enable_patch_interpolator", "use_key_only_attn_mask", "pos_embed_grid_size",
)  # fmt: skip


def is_naflex(shapes: Shapes) -> bool:
    """Whether tensors, by VisionTransformer's names, are NaFlexVit's."""
    return len(shapes.get(KERNEL, ())) == 2


def is_cropped(shapes: Shapes, metadata: Mapping[str, Any]) -> bool:
    """Whether NaFlexVit's tensors are a C-RADIO's: positions are resized without antialiasing; of a file that says
    nothing of it, those with a class token and no last norm.
    """
    if not is_naflex(shapes):
        return False
    known = published.architectures().get(metadata.get("architecture", ""))
    arguments = (known.arguments if known else {}) | dict(metadata)
    if known or "embed_dim" in arguments:
        return is_cropping(arguments)
    return "cls_token" in shapes and not {"norm.weight", "fc_norm.weight"} & shapes.keys()


def is_cropping(arguments: Mapping[str, Any]) -> bool:
    """Whether timm's arguments are a C-RADIO's."""
    return arguments.get("pos_embed_antialias") is False


def as_vit(shapes: Shapes) -> tuple[dict[str, tuple[int, ...]], tuple[int, int] | None]:
    """The shapes that a VisionTransformer's tensors would have, and the grid of the positions, if there are any."""
    width, values = shapes[KERNEL]
    sides = {channels: math.isqrt(values // channels) for channels in (3, 1)}
    fitting = [(c, side) for c, side in sides.items() if c * side * side == values]
    if not fitting:
        raise CheckpointError(f"patches of {values} values are no squares of 1 or 3 channels")
    channels, patch = fitting[0]
    plain = dict(shapes) | {KERNEL: (width, channels, patch, patch)}
    if "pos_embed_x" in shapes:
        return plain, (shapes["pos_embed_y"][1], shapes["pos_embed_x"][1])
    if "pos_embed" not in shapes:
        return plain, None
    _, rows, columns, _ = shapes["pos_embed"]
    return plain | {"pos_embed": (1, rows * columns, width)}, (rows, columns)


def options_from_arguments(take: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """What NaFlexVit's arguments say in its own way, see `vit_arguments.from_arguments`."""
    for name, value in _ONLY.items():
        if (given := take(name, value)) != value:
            raise CheckpointError(f"timm's {name}={given!r} is not supported, only {value!r}")
    if (rope := take("rope_type", "none")) not in ("", "none"):
        raise CheckpointError(f"timm's NaFlexVit with rope_type={rope!r} is not supported")
    for name in _TRAINING:
        take(name, None)
    pooled = options["pool"] == "mean" if (norm := take("fc_norm", None)) is None else norm
    position, method = take("pos_embed", "learned"), take("pos_embed_interp_mode", "bicubic")
    known = ("learned", "factorized", "none"), ("bilinear", "bicubic")
    if position not in known[0] or method not in known[1]:
        raise CheckpointError(
            f"timm's pos_embed={position!r} with pos_embed_interp_mode={method!r} is not supported"
        )
    pre_norm, hidden = take("pre_norm", False), take("attn_pool_mlp_ratio", 0)
    heads = take("attn_pool_num_heads", 0)
    return {
        "key_bias": True,
        "attention_inner_norm": take("scale_attn_inner_norm", False),
        "mlp_inner_norm": take("scale_mlp_norm", False),
        "layer_scale": "all" if take("init_values", 0) else "none",
        "norm_after": False,
        "pre_norm": pre_norm,
        "patch_bias": not pre_norm,
        "patch_norm": bool(take("embed_norm_layer", None)),
        "last_norm": ("pooled" if pooled else "tokens") if take("final_norm", True) else "none",
        "pool_prefix": take("pool_include_prefix", False),
        "map_heads": heads if heads != options["heads"] else 0,
        "map_mlp_dim": int(options["width"] * hidden) if hidden else 0,
        "position": position,
        "position_of_class": False,
        "position_of_registers": False,
        "native_resize": "linear" if position == "factorized" else method,
        "native_aspect": take("pos_embed_ar_preserving", False),
    }


def is_naflex_model(config: PublishedViTConfig) -> bool:
    """Whether a model has what only NaFlexVit of timm's classes has."""
    return (
        config.position == "factorized"
        or config.native_resize != "bilinear"
        or config.native_aspect
    )


def layout() -> dict[str, Any]:
    """The `layout` of a new file."""
    theirs = {name: f"embeds.{name.removeprefix('patch_embed.')}" for name in _THEIRS}
    return {"naflex": True, "renamed": theirs}


def rules(config: PublishedViTConfig) -> list[Rule]:
    """Those of the embedding and of learned positions."""
    table = reshaped((1, -1, config.width), (1, *config.grid, config.width))
    return [
        Rule("embedding/kernel", KERNEL, pytorch.flat_patches(config)),
        Rule("position", "pos_embed", table),
        Rule("position/x", "pos_embed_x"),
        Rule("position/y", "pos_embed_y"),
    ]


def refusal(config: PublishedViTConfig) -> str:
    """Why NaFlexVit cannot compute a model; '' if it can."""
    method = "linear" if config.position == "factorized" else ("bilinear", "bicubic")
    lacks = {
        "distillation token": config.distilled,
        "positions of registers": config.prefix > config.has_class_token,
        "factorized positions of the class token": config.position == "factorized"
        and config.prefix,
        "rotary positions that are read here": config.rope != "none",
        "keys without a bias": config.qkv_bias and not config.key_bias,
        "norms after": config.norm_after,
        "gated MLPs that are read here": config.gated_mlp,
        "layer_scale of attention alone": config.layer_scale == "attention",
        f"{config.position} positions resized by {config.native_resize}": config.native_resize
        not in method,
        "rms norms": config.norm != "layer",
        "norms of another epsilon than 1e-06": config.epsilon != 1e-6,
        "norm of the patches that JSON has": config.patch_norm,
    }
    missing = [part for part, lacking in lacks.items() if lacking]
    return f"timm's NaFlexVit has no {', no '.join(missing)}" if missing else ""


def arguments(config: PublishedViTConfig) -> dict[str, Any]:
    """Those of NaFlexVit beside the ones that VisionTransformer has too."""
    learned = {} if config.position == "factorized" else {"pos_embed_interp_mode": config.native_resize}  # fmt: skip
    return learned | {
        "pos_embed": config.position,
        "pos_embed_ar_preserving": config.native_aspect,
        "pos_embed_grid_size": list(config.grid),
        "attn_pool_num_heads": config.pool_heads,
        "attn_pool_mlp_ratio": config.pool_mlp_dim / config.width,
        "scale_attn_inner_norm": config.attention_inner_norm,
        "scale_mlp_norm": config.mlp_inner_norm,
    }
