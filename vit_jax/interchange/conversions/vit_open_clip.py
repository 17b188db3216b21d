"""The image towers in files of OpenAI's CLIP and of open_clip, beside their text towers: CLIP's ViT (`visual.…`), and
SigLIP's, which is timm's (`visual.trunk.…`). The text towers are in `text_towers`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import (
    clip_names,
    contract,
    vit_new_towers,
    vit_timm,
    vit_tower_names,
)
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.interchange.conversions.skips import Skip
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_VISUAL, _TRUNK = "visual.", "visual.trunk."
OPEN_CLIP = "open_clip"  # of the metadata, `model_cfg` of an open_clip_config.json
# Of OpenAI's and open_clip's ViTs by width, as timm has them.
_HEADS = {640: 10, 768: 12, 896: 14, 1024: 16, 1280: 16, 1408: 16, 1664: 16}
_MEAN, _STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
_ACTIVATION = (
    "quick_gelu is taken, which OpenAI's weights and open_clip's '-quickgelu' models compute with; open_clip's others "
    "have gelu"
)
# CLIP's text tower has no name of its own before those of its layers.
RENAMED = (
    r"^(token_embedding|positional_embedding|transformer|ln_final|text_projection)(?=\.|$)", r"text.\1",
)  # fmt: skip
LEFT_OUT = (
    Skip(r"text\..*", "reads texts, not images", "the text tower"),
    Skip(r"visual\.proj", "leads to where images meet texts", "the text tower"),
    Skip(r"logit_(scale|bias)", "of the loss between images and texts", "the text tower"),
    Skip(r"input_resolution|context_length|vocab_size", "sizes that other tensors tell", "the text tower"),
)  # fmt: skip


class Clip(contract.Conversion):
    """openai/CLIP, and open_clip's models with a ViT of its own."""

    conventions = {"epsilon": 1e-5}
    beside_text = True

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if f"{_VISUAL}class_embedding" not in shapes or "logit_scale" not in shapes:
            return None
        width, channels, patch, _ = shapes[f"{_VISUAL}conv1.weight"]
        rows = shapes[f"{_VISUAL}positional_embedding"][0]
        grid, _ = contract.patch_grid(rows, (1,), patch, metadata)
        block = f"{_VISUAL}transformer.resblocks."
        options = {
            "image_size": contract.image_size(grid, patch),
            "num_classes": 0,
            "channels": channels,
            "patch": patch,
            "depth": contract.count_layers(shapes, rf"{block.replace('.', '[.]')}(\d+)[.]"),
            "width": width,
            "mlp_dim": shapes[f"{block}0.mlp.c_fc.bias"][0],
            "heads": _HEADS.get(width),
            "pre_norm": True,
            "patch_bias": False,
            "last_norm": "pooled",
            "activation": "quick_gelu",
            "epsilon": 1e-5,
        }
        stated = metadata.get(OPEN_CLIP)
        if stated is not None:
            return _as_stated(options, stated)
        doubts = {"activation": contract.Open(("quick_gelu", "gelu"), _ACTIVATION)}
        return contract.DetectedModel(
            options, {}, contract.heads_of(_HEADS, width) | doubts, LEFT_OUT
        )

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        theirs = vit_tower_names.rules(config, {"kind": "clip", "prefix": ""})
        return clip_names.renamed(theirs, _VISUAL, config)

    def refusal(self, config: PublishedViTConfig) -> str:
        return vit_new_towers.refusal(config, "clip")

    def expressed(
        self, config: PublishedViTConfig, params: dict
    ) -> tuple[PublishedViTConfig, dict]:
        return vit_new_towers.expressed(config, params, "clip")

    def preprocessing(self, config: PublishedViTConfig) -> Preprocessing:
        side = min(config.height_width)
        return Preprocessing(config.image_size, _MEAN, _STD, "torchvision", side, "bicubic")


def _as_stated(options: Mapping[str, Any], model_cfg: Mapping[str, Any]) -> contract.DetectedModel:
    """The model of a file with open_clip's own config beside it: heads have 64 channels, and both towers gelu, unless
    it says otherwise.
    """
    activation = "quick_gelu" if model_cfg.get("quick_gelu") else "gelu"
    image = model_cfg.get("vision_cfg", {})
    text = model_cfg.get("text_cfg", {})
    heads = options["width"] // image.get("head_width", 64)
    layout = {}
    if "heads" in text:
        layout[clip_names.KEY] = {"text_heads": text["heads"]}
    options = {**options, "activation": activation, "heads": heads}
    return contract.DetectedModel(options, layout, {}, LEFT_OUT)


class SigLip(vit_timm.Timm):
    """open_clip's SigLIP."""

    conventions = {"activation": "gelu_tanh", "epsilon": 1e-6}
    beside_text = True

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        trunk = {n.removeprefix(_TRUNK): s for n, s in shapes.items() if n.startswith(_TRUNK)}
        if "logit_scale" not in shapes or "attn_pool.latent" not in trunk:
            return None
        detected = super().recognise(trunk, metadata)
        options = detected.options | self.conventions
        unsettled = {n: o for n, o in detected.open.items() if n not in self.conventions}
        return dataclasses.replace(detected, options=options, open=unsettled, left_out=LEFT_OUT)

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        return [
            dataclasses.replace(rule, theirs=tuple(_TRUNK + name for name in rule.names))
            for rule in super().rules(config, layout)
        ]

    def preprocessing(self, config: PublishedViTConfig) -> Preprocessing:
        half = (0.5,) * 3
        return Preprocessing(config.image_size, half, half, "resize", interpolation="bicubic")
