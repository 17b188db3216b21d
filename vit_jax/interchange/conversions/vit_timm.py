"""ViTs of timm: its VisionTransformer (also DeiT, CLIP, SigLIP, DINOv2, …), its Eva (also DINOv3,
Perception Encoders, …), its Beit (`vit_beit`) and its NaFlexVit (`vit_naflex`). What their
arguments say is in `vit_arguments`, what tensors and names in `vit_options`, what new files say in `vit_new_timm`; here
is which tensor is which parameter.
"""

import math
import types
from collections.abc import Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions import (
    contract,
    pytorch,
    vit_arguments,
    vit_beit,
    vit_naflex,
    vit_new_timm,
    vit_options,
    vit_rearranged,
)
from vit_jax.interchange.conversions.rules import SAME, Rule, reordered
from vit_jax.interchange.conversions.vit_flax import with_learned_position, without_class_row
from vit_jax.models import published
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import differential
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig


class Timm(contract.TimmConversion):
    """VisionTransformer, Eva, Beit and NaFlexVit."""

    file_conventions = {"activation": "gelu", "epsilon": 1e-6}
    # The names of DINOv2's and DINOv3's own code, which splits the blocks into chunks while training.
    renamed = (
        (r"^(register|storage)_tokens$", "reg_token"),
        (r"^blocks\.\d+\.(\d+)\.", r"blocks.\1."),
        (r"^(blocks\.\d+\.mlp)\.w12\.", r"\1.fc1."),
        (r"^(blocks\.\d+\.mlp)\.w1\.", r"\1.fc1_g."),
        (r"^(blocks\.\d+\.mlp)\.w2\.", r"\1.fc1_x."),
        (r"^(blocks\.\d+\.mlp)\.w3\.", r"\1.fc2."),
        *vit_naflex.RENAMED,
    )

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if vit_rearranged.is_parallel(shapes):
            shapes = vit_rearranged.as_plain(shapes)
        shapes = vit_rearranged.with_first_branch(shapes)
        names = ("blocks.0.attn.qkv.weight", "blocks.0.attn.q_proj.weight")
        backbone = any(name.startswith("patch_embed.backbone.") for name in shapes)
        if backbone or not any(name in shapes for name in names):
            return None
        if vit_naflex.is_cropped(shapes, metadata):
            return None
        return recognise(shapes, metadata)

    def prepared(self, tensors: Mapping[str, LazyArray]) -> dict[str, LazyArray]:
        """As a plain ViT has them."""
        if vit_rearranged.is_parallel(tensors):
            tensors = vit_rearranged.as_plain(tensors)
        return vit_rearranged.with_all_heads(tensors)

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        """Which tensors are which parameters, in the variant of the names that `layout` describes."""
        pool = "attn_pool"
        biased = config.position == "bias2d"
        table = vit_beit.table_rules(config) if biased else [Rule("position", "pos_embed")]
        own = [pytorch.convolution("embedding", "patch_embed.proj"), *table]
        return [
            *(vit_naflex.rules(config) if layout.get("naflex") else own),
            Rule("embedding/bias", "patch_embed.proj.bias"),
            *pytorch.norm("patch_norm", "patch_embed.norm"),
            Rule("class_token", "cls_token"),
            Rule("distillation_token", "dist_token"),
            Rule("registers", "reg_token"),
            Rule("rope", "rope.freqs"),
            *pytorch.norm("pre_norm", "norm_pre"),
            *_layers(config, layout),
            *pytorch.norm("encoder/norm", "norm"),
            Rule("pool/probe", f"{pool}.latent"),
            *pytorch.attention(
                "pool/attention",
                (f"{pool}.q", f"{pool}.kv"),
                f"{pool}.proj",
                config.width,
                config.pool_heads,
            ),
            *pytorch.norm("pool/norm", f"{pool}.norm"),
            *pytorch.mlp("pool/mlp", f"{pool}.mlp"),
            *pytorch.norm("pool_norm", "fc_norm"),
            # Before its version 0.8, for ImageNet-21k.
            *pytorch.linear("representation", "pre_logits.fc"),
            *pytorch.linear("head", "head"),
            *pytorch.linear("head_distilled", "head_dist"),
        ]

    def layout(self, config: PublishedViTConfig) -> dict[str, Any]:
        """Names that differ: `layer_scale` is 'gamma' in Eva; `mlp` with a gate is 'packed' in one layer or in
        'separate' ones; `qkv` may be 'separate' too; `rope_columns_first`, see `rotary_channels`; `naflex` is true of
        NaFlexVit.
        """
        eva = vit_new_timm.is_eva(config)
        packed = eva and not config.mlp_inner_norm
        naflex = vit_naflex.layout() if vit_naflex.is_naflex_model(config) else {}
        return naflex | {
            "layer_scale": "gamma" if eva else "ls",
            "qkv": "fused",
            "mlp": ("packed" if packed else "separate") if config.gated_mlp else "",
            "rope_columns_first": False,
        }

    def refusal(self, config: PublishedViTConfig) -> str:
        if config.norm_residual:
            return "timm has no norms after the residual sum (norm_residual=True)"
        naflex = vit_naflex.is_naflex_model(config)
        if naflex and (reason := vit_naflex.refusal(config)):
            return reason
        if config.position == "bias2d":
            return vit_beit.refusal(config)
        if config.distilled and (not config.distillation_head or config.registers):
            return "timm's distilled models read both tokens and have no registers"
        if config.epsilon not in (1e-6, 1e-5):
            return (
                f"timm computes with epsilon = 1e-06 or 1e-05, this model with {config.epsilon!r}. To accept the "
                "other numbers, pass --model=epsilon=1e-06 on the command line, or convert(…, epsilon=1e-6) in Python"
            )
        if config.pool not in vit_new_timm.POOLS:
            return f"timm has no pooling {config.pool!r}"
        if config.rope_registers:
            return f"timm does not rotate registers (rope_registers={config.rope_registers:g})"
        if (config.block_branches or config.differential) and (reason := _refused_blocks(config)):
            return reason
        if config.parallel or (config.norm == "layer" and not config.norm_bias):
            return "timm has no parallel blocks with such tensors, nor layer norms without biases"
        if config.weighted_layers:
            return "the format has no weighted_layers=True"
        if config.position_place not in ("", "stem"):
            return (
                f"the format has no {config.position} positions in layers (position_at="
                f"{config.position_at}), only at the stem"
            )
        return ""

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        """Positions are learned, where there are any beside rotary ones; with registers that have none, the
        class token has none either.
        """
        alone = config.position == "none" and vit_new_timm.is_eva(config)
        if alone or config.position == "bias2d":
            return config, params
        naflex = vit_naflex.is_naflex_model(config)
        if config.position != "factorized":
            config, params = with_learned_position(config, params)
        if naflex:
            return without_class_row(config, params)
        if config.registers and not config.position_of_registers:
            return without_class_row(config, params)
        return config, params

    def preprocessing(self, config: PublishedViTConfig) -> Preprocessing | None:
        """A plain ViT's may be Google's or DeiT's."""
        if not config.distilled:
            return None
        side = math.floor(min(config.height_width) / 0.9)
        return torchvision_crop(config.image_size, side)

    def architecture(
        self, config: PublishedViTConfig, layout: Mapping[str, Any]
    ) -> tuple[str, dict]:
        return vit_new_timm.architecture(config, layout, vit_new_timm.arguments(config, layout))


def _layers(config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
    """The rules of all blocks."""
    if not config.block_branches:
        return _block_rules(config, layout, "encoder/layers")
    rules = []
    for i in range(config.block_branches):
        ours = f"encoder/layers/branches/{i}" if i else "encoder/layers"
        names = {plain: theirs for theirs, plain in vit_rearranged.names_of_branch(i)}
        rules += _block_rules(config, layout, ours, names)
    return rules


def _block_rules(
    config: PublishedViTConfig,
    layout: Mapping[str, Any],
    ours: str,
    names: Mapping[str, str] = types.MappingProxyType({}),
) -> list[Rule]:
    """The rules of one attention and MLP with norms and scales.

    Args:
      ours: where our parameters are.
      names: timm's for parts that are called otherwise than `norm1`, `attn` and the like.
    """

    def at(plain: str) -> str:
        return f"blocks.{{layer}}.{names.get(plain, plain)}"

    attention, mlp = at("attn"), at("mlp")
    qkv = (f"{attention}.qkv",)
    biases = (f"{attention}.q_bias", f"{attention}.v_bias")
    if layout.get("qkv") == "separate":
        qkv = tuple(f"{attention}.{name}_proj" for name in "qkv")
        biases = (f"{qkv[0]}.bias", f"{qkv[2]}.bias")
    size = config.width // config.heads
    channels = None
    if config.rope in ("axial", "mixed"):
        first = layout.get("rope_columns_first", False)
        channels = pytorch.rotary_channels(size, columns_first=first)
    of_head = SAME if channels is None else reordered(0, channels)
    up = pytorch.linear(f"{ours}/mlp/up", f"{mlp}.fc1")
    if config.gated_mlp:
        separate = layout.get("mlp") == "separate"
        halves = (f"{mlp}.fc1_g", f"{mlp}.fc1_x") if separate else f"{mlp}.fc1"
        up = pytorch.gated(f"{ours}/mlp/up", halves)
    gamma = layout.get("layer_scale") == "gamma"
    scales = [at(f"gamma_{i}") if gamma else f"{at(f'ls{i}')}.gamma" for i in (1, 2)]
    return [
        *pytorch.norm(f"{ours}/attention_norm", at("norm1")),
        *pytorch.attention(
            f"{ours}/attention",
            qkv,
            f"{attention}.proj",
            config.width,
            config.heads,
            query_value_biases=None if config.key_bias else biases,
            channels=channels,
        ),
        *pytorch.norm(f"{ours}/attention/query_norm", f"{attention}.q_norm", 0, of_head),
        *pytorch.norm(f"{ours}/attention/key_norm", f"{attention}.k_norm", 0, of_head),
        *pytorch.norm(f"{ours}/attention/inner_norm", f"{attention}.norm"),
        *(Rule(f"{ours}/attention/{n}", f"{attention}.{n}") for n in differential.LAMBDAS),
        *pytorch.norm(f"{ours}/attention/head_norm", f"{attention}.sub_norm"),
        Rule(f"{ours}/attention_scale/scale", scales[0]),
        *pytorch.norm(f"{ours}/mlp_norm", at("norm2")),
        *up,
        *pytorch.norm(f"{ours}/mlp/norm", f"{mlp}.norm"),
        *pytorch.linear(f"{ours}/mlp/down", f"{mlp}.fc2"),
        Rule(f"{ours}/mlp_scale/scale", scales[1]),
    ]


def _refused_blocks(config: PublishedViTConfig) -> str:
    """Why timm has no such blocks with several attentions side by side, or differential attention; '' if it has."""
    if config.block_branches not in (0, 2):
        return f"timm has two attentions side by side, not block_branches={config.block_branches}"
    lacks = {
        "a distillation token": config.distilled,
        "rotary positions, or keys without biases": vit_new_timm.is_eva(config),
        "positions of a NaFlexVit": vit_naflex.is_naflex_model(config),
    }
    listed = [name for name, lacking in lacks.items() if lacking]
    own = "block_branches=2" if config.block_branches else "differential=True"
    return f"timm has no {', no '.join(listed)} beside {own}" if listed else ""


def recognise(
    shapes: contract.Shapes, metadata: Mapping[str, Any], stride: int = 1
) -> contract.DetectedModel:
    """A ViT whose patches are counted in `stride` pixels."""
    has_class = "cls_token" in shapes
    naflex = vit_naflex.is_naflex(shapes)
    plain, grid = vit_naflex.as_vit(shapes) if naflex else (shapes, None)
    known_options = vit_options.from_tensors(plain)
    settled, left, assumed = vit_options.settled(known_options, shapes, metadata)
    columns_first = settled.pop("rope_columns_first", False)
    options = known_options | settled | {"keep_class_token": has_class}
    pixels, placed = known_options["patch"] * stride, has_class + known_options["distilled"]
    known = published.preprocessing(metadata.get("architecture", ""), metadata.get("tag", ""))
    metadata = ({"image_size": known.image_size} if known else {}) | dict(metadata)
    if grid:
        options |= image_options(grid, pixels, metadata)
        options |= {"position_of_class": False, "position_of_registers": False}
    elif "pos_embed" in shapes:
        prefixes = dict.fromkeys((placed + known_options["registers"], placed, 0))
        grid, prefix = contract.patch_grid(shapes["pos_embed"][1], prefixes, pixels, metadata)
        options |= {
            **image_options(grid, pixels, metadata),
            "position_of_class": bool(prefix),
            "position_of_registers": prefix > placed,
        }
    elif table := vit_beit.bias_table(shapes):
        options["image_size"] = vit_beit.image_size(table[0], pixels, metadata)
    else:
        size = metadata.get("image_size") or metadata.get("wanted_size")
        if not size:
            raise CheckpointError(
                "there is no table of positions, and nothing says the size of the images: set it when it is "
                "loaded or converted, such as image_size=224 (--model=image_size=224)"
            )
        options["image_size"] = size
    attention = "blocks.0.attn"
    separate = "blocks.0.mlp.fc1_g.weight" in shapes
    layout = {
        "layer_scale": "gamma" if "blocks.0.gamma_1" in shapes else "ls",
        "qkv": "separate" if f"{attention}.q_proj.weight" in shapes else "fused",
        "mlp": ("separate" if separate else "packed") if known_options["gated_mlp"] else "",
        "rope_columns_first": columns_first,
    } | ({"naflex": True} if naflex else {})
    left_out = vit_beit.LEFT_OUT if known_options["position"] == "bias2d" else ()
    return contract.DetectedModel(options, layout, left, left_out, assumed=assumed)


def image_options(
    grid: tuple[int, int], pixels: int, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """The size of images of such a grid, and whether the patches leave a rest of images of the given size."""
    size = metadata.get("image_size")
    if size and tuple(side // pixels for side in sizes.height_width(size)) == grid:
        rest = size != contract.image_size(grid, pixels)
        return {"image_size": size} | ({"crop_to_patches": True} if rest else {})
    return {"image_size": contract.image_size(grid, pixels)}


def activation(metadata: Mapping[str, Any]) -> str:
    """What a folder's config.json says, or timm's usual one."""
    name = metadata.get("act_layer", "gelu")
    if name not in vit_arguments.ACTIVATIONS:
        raise CheckpointError(
            f"the activation {name!r} is not supported; {', '.join(vit_arguments.ACTIVATIONS)} are"
        )
    return vit_arguments.ACTIVATIONS[name]
