"""torchvision's VisionTransformer: a plain ViT, in names of today and of its version 0.12. It is read, not written."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, vit_5, vit_timm
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models.preprocessing import Preprocessing, torchvision_crop
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_HEADS = {768: 12, 1024: 16, 1280: 16}  # of its models by width
_CROPPED = 0.875  # of the smaller side, by its image transforms
_LAYER = "encoder.layers.encoder_layer_{layer}"
# timm's names to its own.
_NAMES = (
    ("cls_token", "class_token"),
    ("pos_embed", "encoder.pos_embedding"),
    ("patch_embed.proj.", "conv_proj."),
    ("pre_logits.fc.", "heads.pre_logits."),
    ("head.", "heads.head."),
    ("norm.", "encoder.ln."),
    ("blocks.{layer}.norm1.", f"{_LAYER}.ln_1."),
    ("blocks.{layer}.norm2.", f"{_LAYER}.ln_2."),
    ("blocks.{layer}.attn.qkv.", f"{_LAYER}.self_attention.in_proj_"),
    ("blocks.{layer}.attn.proj.", f"{_LAYER}.self_attention.out_proj."),
    ("blocks.{layer}.mlp.fc1.", f"{_LAYER}.mlp.0."),
    ("blocks.{layer}.mlp.fc2.", f"{_LAYER}.mlp.3."),
)
# Names before version 0.13, and of a new head.
RENAMED = (
    (r"^(encoder\.layers\.encoder_layer_\d+\.mlp)\.linear_1\.", r"\1.0."),
    (r"^(encoder\.layers\.encoder_layer_\d+\.mlp)\.linear_2\.", r"\1.3."),
    (r"^heads\.(head\.1\.)?(weight|bias)$", r"heads.head.\2"),
)


class TorchVision(vit_timm.Timm):
    """torchvision's vit_b_16, vit_b_32, vit_l_16, vit_l_32, vit_h_14, and others of its class."""

    conventions = {"activation": "gelu", "epsilon": 1e-6}

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if not {"conv_proj.weight", "encoder.pos_embedding", "class_token"} <= shapes.keys():
            return None
        detected = vit_timm.recognise(_with_names_of_timm(shapes), metadata)
        width = detected.options["width"]
        options = detected.options | self.conventions | {"pool": "token"}
        return dataclasses.replace(
            detected,
            options=options | {"heads": _HEADS.get(width)},
            open=contract.heads_of(_HEADS, width),
            assumed=("heads",),
        )

    def rules(self, config: PublishedViTConfig, layout: Mapping[str, Any]) -> list[Rule]:
        named = (
            (rule, tuple(map(_its_name, rule.names))) for rule in super().rules(config, layout)
        )
        return [dataclasses.replace(rule, theirs=names) for rule, names in named if all(names)]

    def refusal(self, config: PublishedViTConfig) -> str:
        return vit_5.Authors().refusal(config)  # it is none of those that are written

    def preprocessing(self, config: PublishedViTConfig) -> Preprocessing:
        side = round(min(config.height_width) / _CROPPED)
        return dataclasses.replace(
            torchvision_crop(config.image_size, side), interpolation="bilinear"
        )


def _its_name(name: str) -> str:
    """The name of a tensor of timm's; '' where it has none."""
    for theirs, own in _NAMES:
        if name == theirs or theirs.endswith(".") and name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return ""


def _with_names_of_timm(shapes: contract.Shapes) -> dict[str, tuple[int, ...]]:
    """Shapes by timm's names."""
    depth = contract.count_layers(shapes, r"encoder\.layers\.encoder_layer_(\d+)\.")
    by_name = {}
    for theirs, own in _NAMES:
        for layer in range(depth) if "{layer}" in own else (0,):
            before = own.format(layer=layer)
            for name, shape in shapes.items():
                if name == before or before[-1] in "._" and name.startswith(before):
                    by_name[theirs.format(layer=layer) + name.removeprefix(before)] = shape
    return by_name
