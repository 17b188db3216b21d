"""BEiT, BEiT v2 and data2vec-vision: what timm's Beit has otherwise than timm's VisionTransformer, and what files of
these networks have beside them. Their places are known from a bias of attention's logits for each distance
(`model.position=bias2d`): each block has its own, or before fine-tuning all have the same.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, vit_flax
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.skips import Skip
from vit_jax.models.relative_positions import OTHERS
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_TABLE = "relative_position_bias_table"
OWN, SHARED = f"blocks.{{layer}}.attn.{_TABLE}", f"rel_pos_bias.{_TABLE}"
# Parts in which BEiT may differ from the ViT of 2020.
_PARTS = (
    "keep_class_token", "position_at", "last_norm", "key_bias", "layer_scale", "mlp_inner_norm", "gated_mlp",
)  # fmt: skip


def bias_table(shapes: contract.Shapes) -> tuple[int, ...] | None:
    """The shape of a table of biases, by timm's names; `None` where there is none."""
    return shapes.get(OWN.format(layer=0)) or shapes.get(SHARED)


def options_from_tensors(shapes: contract.Shapes) -> dict[str, Any]:
    """What a file's tensors tell of positions that are not all timm's VisionTransformer's."""
    if "pos_embed" in shapes or (SHARED in shapes and OWN.format(layer=0) in shapes):
        raise CheckpointError(
            "a table of biases of distances beside other positions (pos_embed, or one that all blocks share) is not "
            "supported"
        )
    return {"position": "bias2d", "position_at": "shared" if SHARED in shapes else "auto"}


def options_from_arguments(take: Callable, options: Mapping[str, Any]) -> dict[str, Any]:
    """What Beit's arguments say in its own way, see `vit_arguments.from_arguments`."""
    pooled = options["pool"] == "mean" if (norm := take("use_fc_norm", None)) is None else norm
    table, own = take("use_abs_pos_emb", True), take("use_rel_pos_bias", False)
    shared = take("use_shared_rel_pos_bias", False)
    if table or own == shared:
        raise CheckpointError(
            f"timm's Beit with use_abs_pos_emb={table}, use_rel_pos_bias={own} and use_shared_rel_pos_bias={shared} "
            "is not supported, only with one of the last two alone"
        )
    return {
        "key_bias": not options["qkv_bias"],
        "attention_inner_norm": False,
        "mlp_inner_norm": take("scale_mlp", False),
        "layer_scale": "all" if take("init_values", 0) else "none",
        "norm_after": False,
        "pre_norm": False,
        "patch_bias": True,
        "patch_norm": False,
        "last_norm": "pooled" if pooled else "tokens",
        "pool_prefix": False,
        "map_heads": 0,
        "position": "bias2d",
        "position_at": "shared" if shared else "auto",
    }


def image_size(rows: int, pixels: int, metadata: Mapping[str, Any]) -> sizes.Size:
    """The size of images whose patches, of so many pixels, have a table of so many rows: that which is known, else a
    square, else that which is wanted.

    Raises:
      CheckpointError: there is none.
    """

    def fits(grid: tuple[int, ...]) -> bool:
        return math.prod(2 * side - 1 for side in grid) == rows - OTHERS

    known, wanted = (
        tuple(side // pixels for side in sizes.height_width(metadata.get(name) or 0))
        for name in ("image_size", "wanted_size")
    )
    square = ((math.isqrt(max(rows - OTHERS, 1)) + 1) // 2,) * 2
    grid = next((grid for grid in (known, square, wanted) if all(grid) and fits(grid)), None)
    if grid is None:
        raise CheckpointError(
            f"a table of {rows} biases of distances is of no square grid, and nothing says its height and width: set "
            "the size of the checkpoint's own images, such as image_size='224x448', when it is loaded or converted "
            "(--model=image_size=224x448)"
        )
    return contract.image_size(grid, pixels)


def index(grid: tuple[int, int]) -> np.ndarray:
    """(1 + N, 1 + N): the row of the table for each query and key, the class token first."""
    places = np.stack(np.indices(grid), -1).reshape(-1, 2)
    down, across = np.moveaxis(places[:, None] - places + np.asarray(grid) - 1, -1, 0)
    last = math.prod(2 * side - 1 for side in grid) + OTHERS
    result = np.full((1 + len(places),) * 2, last - 3)
    result[1:, 0], result[0, 0] = last - 2, last - 1
    result[1:, 1:] = down * (2 * grid[1] - 1) + across
    return result


# What the files of the authors and of older versions of timm have beside the network.
LEFT_OUT = (
    Skip(
        r"(.*\.)?relative_position_index", "which row of the table is of which pair of patches, as its grid has it",
        computed=lambda stored, config: index(config.grid),
    ),
    Skip(r"lm_head\..*", "predicts the visual words of hidden patches", "a head of pre-training"),
)  # fmt: skip


def table_rules(config: PublishedViTConfig) -> list[Rule]:
    """Those of the tables."""
    return [Rule("encoder/layers/position", OWN), Rule("position", SHARED)]


def refusal(config: PublishedViTConfig) -> str:
    """Why timm's Beit cannot compute a model; '' if it can."""
    lacks = {
        f"model without a class token, as pool={config.pool!r} has": not config.has_class_token,
        f"pool={config.pool!r}": config.pool not in ("token", "mean"),
        "distillation token": config.distilled,
        "registers": config.registers,
        "qk_norm": config.qk_norm,
        "parallel blocks": config.parallel,
        "norms without biases": not config.norm_bias,
        "bias of keys": config.qkv_bias and config.key_bias,
        "last_norm='none'": config.last_norm == "none",
        "layer_scale of attention alone": config.layer_scale == "attention",
        "tanh layer": config.representation,
        "weighted_layers": config.weighted_layers,
        "epsilon but 1e-06": config.epsilon != 1e-6,
        f"activation {config.activation!r}": config.activation
        != ("silu" if config.gated_mlp else "gelu"),
    }
    missing = [name for name, lacking in lacks.items() if lacking]
    missing += vit_flax.parts_beside(config, _PARTS)
    return f"timm's Beit has no {', no '.join(missing)}" if missing else ""


def beit_arguments(config: PublishedViTConfig) -> dict[str, Any]:
    """Those of Beit beside the ones that VisionTransformer has too."""
    shared = config.position_place == "shared"
    scaled = {"init_values": config.layer_scale_init if config.layer_scale == "all" else None}
    return scaled | {
        "use_abs_pos_emb": False,
        "use_rel_pos_bias": not shared,
        "use_shared_rel_pos_bias": shared,
        "use_fc_norm": config.last_norm == "pooled",
        "swiglu_mlp": config.gated_mlp,
        "scale_mlp": config.mlp_inner_norm,
    }
