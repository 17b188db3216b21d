"""T2T-ViT with the names of its authors' code, as `torch.save` wrote them or as tensors alone.

That code has a window's channels one after the other, each with all its places; ours has its places one
after the other, each with all channels. What no tensor tells, and is then taken unless the user, the
model that is loaded or a file of ours says it: heads, those of the published size of that depth and
width; `qk_scale`, for such a size the code's default; the windows of the image, those of 7, 11 or 14
pixels that give three channels, else of 7.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from vit_jax.base.errors import CheckpointError
from vit_jax.base.sizes import Size
from vit_jax.interchange.conversions import contract, pytorch
from vit_jax.interchange.conversions.rules import (
    Rule,
    Transform,
    chain,
    reordered,
    reshaped,
    transposed,
)
from vit_jax.interchange.conversions.vit_flax import refusal_everywhere
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo import t2t

Split = tuple[int, int, int]
_MODULE = "tokens_to_token"
_ASK_SCALE = (
    "qk_scale: 0 if the authors' network was built without it, which gives 1/√(channels of a head); {:g}, 1/√width, "
    "if with pretrained=True"
)
_FIRST = f"{_MODULE}.attention1"
_FIRST_SPLITS: tuple[Split, ...] = (t2t.FIRST_SPLIT, (11, 6, 5), (14, 8, 3))


class Authors(contract.Conversion):
    """yitu-opensource/T2T-ViT."""

    conventions = {"activation": "gelu", "epsilon": 1e-5, "parallel": False}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if f"{_FIRST}.norm1.weight" not in shapes or "cls_token" not in shapes:
            return None
        width, depth = shapes["cls_token"][-1], contract.count_layers(shapes, r"blocks\.(\d+)\.")
        (inputs,) = shapes[f"{_FIRST}.norm1.weight"]
        split = _first_split(inputs, metadata)
        performer = f"{_FIRST}.w" in shapes
        options = {
            "image_size": _image_size(shapes["pos_embed"][1], split, metadata),
            "channels": inputs // split[0] ** 2,
            "num_classes": shapes.get("head.bias", (0,))[0],
            "depth": depth,
            "width": width,
            "mlp_dim": shapes["blocks.0.mlp.fc1.bias"][0],
            "qkv_bias": "blocks.0.attn.qkv.bias" in shapes,
            "first_split": split,
            "token_width": shapes[f"{_FIRST}.norm2.weight"][0],
            "token_attention": "performer" if performer else "full",
            "token_bias": performer or f"{_FIRST}.attn.qkv.bias" in shapes,
            "token_dropout": 0.1 if performer else 0.0,
            "activation": "gelu",
            "epsilon": 1e-5,
        }
        if performer:
            options["random_features"] = shapes[f"{_FIRST}.w"][0]
        published = {(d, w): heads for d, w, _, heads in t2t.SIZES.values()}
        heads = published.get((depth, width))
        left_open = contract.heads_of(published, (depth, width), "(depth, width)")
        left_open["qk_scale"] = contract.Open(ask="" if heads else _ASK_SCALE.format(width**-0.5))
        options |= {"heads": heads, "qk_scale": 0.0}
        return contract.DetectedModel(
            options, open=left_open, assumed=("first_split", "activation", "epsilon")
        )

    def rules(self, config, layout: Mapping[str, Any]) -> list[Rule]:
        ours, theirs = "encoder/layers", "blocks.{layer}"
        width = config.token_width
        last = chain(_places_first(1, width, config.splits[2]), transposed(1, 0))
        return [
            *_token_layer("first", "attention1", config, config.channels, config.splits[0]),
            *_token_layer("second", "attention2", config, width, config.splits[1]),
            Rule("embedding/project/kernel", f"{_MODULE}.project.weight", last),
            Rule("embedding/project/bias", f"{_MODULE}.project.bias"),
            Rule("class_token", "cls_token"),
            Rule("position", "pos_embed"),
            *pytorch.block(ours, theirs, config.width, config.heads),
            *pytorch.norm("encoder/norm", "norm"),
            *pytorch.linear("head", "head"),
        ]

    def refusal(self, config) -> str:
        if refusal := refusal_everywhere(config):
            return refusal
        if config.pool != "token" or not config.norm_bias:
            return "its authors' T2T-ViT reads a class token, after blocks whose norms have biases"
        if config.position not in ("sinusoid", "learned") or not config.position_of_class:
            return "its authors' T2T-ViT has a table of positions, with a row for the class token"
        if config.token_bias != (config.token_attention == "performer"):
            return "between the splits its authors' performers have biases, and full attention has none"
        return ""

    def preprocessing(self, config) -> Preprocessing:
        """Of the published models."""
        side = math.floor(min(config.height_width) / 0.9)
        return torchvision_crop(config.image_size, side)


def _token_layer(
    ours: str, theirs: str, config: t2t.Config, channels: int, split: Split
) -> list[Rule]:
    """A layer between the splits; the Performer's parts have other names."""
    ours, theirs, width = f"embedding/{ours}", f"{_MODULE}.{theirs}", config.token_width
    performer = config.token_attention == "performer"
    attention, qkv = (theirs, "kqv") if performer else (f"{theirs}.attn", "qkv")
    up, down = ("mlp.0", "mlp.2") if performer else ("mlp.fc1", "mlp.fc2")
    order = (1, 0, 2) if performer else (0, 1, 2)
    inputs = split[0] ** 2 * channels
    kernel = chain(
        _places_first(1, channels, split),
        transposed(1, 0),
        reshaped((inputs, 3, 1, width), (inputs, 3 * width)),
        reordered(1, order),
    )
    bias = chain(reshaped((3, 1, width), (3 * width,)), reordered(0, order))
    out = chain(transposed(1, 0), reshaped((1, width, width), (width, width)))
    norm = [
        dataclasses.replace(rule, transform=_places_first(0, channels, split))
        for rule in pytorch.norm(f"{ours}/attention_norm", f"{theirs}.norm1")
    ]
    return [
        *norm,
        Rule(f"{ours}/attention/qkv/kernel", f"{attention}.{qkv}.weight", kernel),
        Rule(f"{ours}/attention/qkv/bias", f"{attention}.{qkv}.bias", bias),
        Rule(f"{ours}/attention/out/kernel", f"{attention}.proj.weight", out),
        Rule(f"{ours}/attention/out/bias", f"{attention}.proj.bias"),
        Rule(f"{ours}/attention/directions", f"{theirs}.w"),
        *pytorch.norm(f"{ours}/mlp_norm", f"{theirs}.norm2"),
        *pytorch.linear(f"{ours}/mlp/up", f"{theirs}.{up}"),
        *pytorch.linear(f"{ours}/mlp/down", f"{theirs}.{down}"),
    ]


def _places_first(axis: int, channels: int, split: Split) -> Transform:
    """From channels with all places of a window to places with all channels."""
    size = split[0]
    order = np.arange(channels * size**2).reshape(channels, -1).T.ravel()
    return reordered(axis, order)


def _image_size(rows: int, split: Split, metadata: Mapping[str, Any]) -> Size:
    """The given size, else that of a square grid."""
    if "image_size" in metadata:
        return metadata["image_size"]
    stride = split[1] * t2t.LATER_SPLIT[1] ** 2
    return contract.image_size(contract.patch_grid(rows, (1,), stride, metadata)[0], stride)


def _first_split(inputs: int, metadata: Mapping[str, Any]) -> Split:
    """The windows of the image, from how many numbers they have."""
    if "first_split" in metadata:
        return tuple(metadata["first_split"])
    usual = (split for split in _FIRST_SPLITS if inputs == 3 * split[0] ** 2)
    split = next(usual, t2t.FIRST_SPLIT)
    if inputs % split[0] ** 2:
        raise CheckpointError(
            f"windows of {inputs} numbers are of none of the known sizes: "
            + ", ".join(f"{size}x{size}" for size, _, _ in _FIRST_SPLITS)
        )
    return split
