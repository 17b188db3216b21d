"""CrossViTs of IBM/CrossViT and of timm.

The tensors leave open: the heads, assumed to be those of the published size of that width; the patches
of a convolutional stem, 12 and 16 in both codes; the height and width of images that are not square.
The large branch's images are assumed to have about the proportions of the small branch's.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.vit_new_timm import ratio, timm_size
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import crossvit

# From this size on, the published weights see whole images.
_WHOLE = 408


class Authors(contract.Conversion):
    """IBM/CrossViT: `cls_token.0`, where timm has `cls_token_0`."""

    conventions = {"epsilon": 1e-6, "activation": "gelu"}
    dot = "."

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if f"cls_token{self.dot}0" not in shapes:
            return None
        if "blocks.0.fusion.0.0.norm1.weight" in shapes:
            raise CheckpointError(
                "several cross-attentions in a stage are not supported: no published CrossViT has them"
            )
        stem = "patch_embed.0.proj.0.weight" in shapes
        kernels = [shapes[f"patch_embed.{i}.proj{'.0' if stem else ''}.weight"] for i in (0, 1)]
        small_patch, patch = crossvit.STEMS if stem else (kernel[2] for kernel in kernels)
        (small_rows, small_width), (rows, width) = (
            shapes[f"pos_embed{self.dot}{i}"][1:] for i in (0, 1)
        )
        small_size = contract.image_size(
            contract.patch_grid(small_rows, (1,), small_patch, metadata)[0], small_patch
        )
        size = contract.image_size(_grid_like(small_size, rows - 1), patch)
        usual = crossvit.default_large_size(small_size, patch)
        options = {
            "image_size": small_size,
            "large_image_size": 0 if size == usual else size,
            "num_classes": shapes.get("head.0.bias", (0,))[0],
            "patch": patch,
            "width": width,
            "mlp_dim": shapes["blocks.0.blocks.1.0.mlp.fc1.bias"][0],
            "small_patch": small_patch,
            "small_width": small_width,
            "small_mlp_dim": shapes["blocks.0.blocks.0.0.mlp.fc1.bias"][0],
            "depths": tuple(
                tuple(
                    contract.count_layers(shapes, rf"blocks\.{stage}\.blocks\.{i}\.(\d+)\.")
                    for i in (0, 1)
                )
                for stage in range(contract.count_layers(shapes, r"blocks\.(\d+)\."))
            ),
            "convolutional_stem": stem,
            "channels": kernels[0][1],
        }
        published = {2 * width: heads for width, heads, *_ in crossvit.SIZES.values()}
        return contract.DetectedModel(
            options | {"heads": published.get(width)},
            open=contract.heads_of(published, width),
            assumed=("activation", "epsilon"),
        )

    def rules(self, config: crossvit.Config, layout: Mapping[str, Any]) -> list[Rule]:
        widths = [branch.width for branch in config.branches.values()]
        rules = []
        for i, branch in enumerate(crossvit.BRANCHES):
            rules += [
                *_stem(f"embedding/{branch}", f"patch_embed.{i}.proj", config.convolutional_stem),
                Rule(f"class_token/{branch}", f"cls_token{self.dot}{i}"),
                Rule(f"position/{branch}", f"pos_embed{self.dot}{i}"),
                *pytorch.norm(f"norm/{branch}", f"norm.{i}"),
                *pytorch.linear(f"head/{branch}", f"head.{i}"),
            ]
            other = crossvit.BRANCHES[1 - i]
            for stage in range(len(config.depths)):
                ours, theirs = f"stages/{stage + 1}", f"blocks.{stage}"
                blocks = f"{ours}/{branch}/layers", f"{theirs}.blocks.{i}.{{layer}}"
                cross = f"{ours}/{branch}_to_{other}"
                rules += pytorch.block(*blocks, widths[i], config.heads)
                rules += _projection(f"{cross}/project", f"{theirs}.projs.{i}")
                rules += _cross_attention(
                    cross, f"{theirs}.fusion.{i}", widths[1 - i], config.heads
                )
                rules += _projection(f"{cross}/back", f"{theirs}.revert_projs.{i}")
        return rules

    def preprocessing(self, config: crossvit.Config) -> Preprocessing:
        """Of the published models."""
        side = min(config.height_width)
        resized = side if side >= _WHOLE else math.floor(side / 0.875)
        return torchvision_crop(config.image_size, resized)


class Timm(Authors, contract.TimmConversion):
    """timm."""

    dot = "_"

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        detected = super().recognise(shapes, metadata)
        if not detected:
            return None
        if metadata.get("global_pool", "token") != "token" or metadata.get("crop_scale"):
            raise CheckpointError(
                "of timm's CrossViTs, those with global_pool='avg' or crop_scale are not supported"
            )
        heads = metadata.get("num_heads")
        if not heads:
            return detected
        if len(set(heads)) > 1:
            raise CheckpointError(f"branches with different heads {heads} are not supported")
        return dataclasses.replace(
            detected, options=detected.options | {"heads": heads[0]}, open={}
        )

    def architecture(self, config: crossvit.Config, layout: Mapping[str, Any]) -> tuple[str, dict]:
        branches = config.branches.values()
        (height, width), large = (branch.height_width for branch in branches)
        scale = ratio(large[0], height)
        if int(width * scale) != large[1]:
            raise CheckpointError(
                f"timm scales height and width by one factor, which cannot make {large[0]}x{large[1]} of "
                f"{height}x{width}: write a .safetensors file"
            )
        return f"crossvit_15_{'dagger_' if config.convolutional_stem else ''}240", {
            "img_size": timm_size(config.image_size),
            "img_scale": [1.0, scale],
            "patch_size": [branch.patch for branch in branches],
            "embed_dim": [branch.width for branch in branches],
            "depth": [[*stage, 0] for stage in config.depths],
            "num_heads": [config.heads] * 2,
            "mlp_ratio": [*(ratio(branch.mlp_dim, branch.width) for branch in branches), 1],
        }


def _stem(ours: str, theirs: str, convolutional: bool) -> list[Rule]:
    if not convolutional:
        return pytorch.patches(ours, theirs)
    rules = []
    for i in range(3):
        # Theirs count the ReLUs too.
        rules += pytorch.patches(f"{ours}/conv{i + 1}", f"{theirs}.{2 * i}")
    return rules


def _cross_attention(ours: str, theirs: str, width: int, heads: int) -> list[Rule]:
    qkv = tuple(f"{theirs}.attn.w{name}" for name in "qkv")
    return [
        *pytorch.norm(f"{ours}/attention_norm", f"{theirs}.norm1"),
        *pytorch.attention(f"{ours}/attention", qkv, f"{theirs}.attn.proj", width, heads),
    ]


def _projection(ours: str, theirs: str) -> list[Rule]:
    return [
        *pytorch.norm(f"{ours}/norm", f"{theirs}.0"),
        *pytorch.linear(f"{ours}/linear", f"{theirs}.2"),
    ]


def _grid_like(size: sizes.Size, patches: int) -> tuple[int, int]:
    """The grid (down, across) of so many patches whose proportions are nearest to those of `size`."""
    height, width = sizes.height_width(size)
    divisors = [down for down in range(1, patches + 1) if patches % down == 0]
    down = min(divisors, key=lambda down: abs(math.log(down**2 / patches * width / height)))
    return down, patches // down
