"""ViTs on a ResNet: of google-research/vision_transformer and of timm.

timm's group norms have an epsilon of 1e-5 instead of 1e-6, which moves logits by 1e-4 of their
size: what is read keeps that, what is written gets it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from vit_jax.base.errors import CheckpointError
from vit_jax.interchange.conversions import contract, resnet, vit_flax, vit_new_timm, vit_timm
from vit_jax.interchange.conversions.rules import Rule
from vit_jax.models.preprocessing import Preprocessing
from vit_jax.models.zoo import resnet as backbones
from vit_jax.models.zoo.hybrid import Config

# timm builds a hybrid's ResNet in the function of that name.
_IN_TIMM = {
    (): "vit_tiny_r_s16_p8_224",
    (2, 2, 2, 2): "vit_small_r26_s32_224",
    (3, 4, 9): "vit_base_r50_s16_224",
    (3, 4, 6, 3): "vit_large_r50_s32_224",
}
_BACKBONE = "patch_embed.backbone."


class Official(vit_flax.Official):
    """google-research/vision_transformer."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        if not {"conv_root/kernel", "embedding/kernel", vit_flax.POSITION_OFFICIAL} <= set(shapes):
            return None
        sizes = resnet.flax_sizes(shapes)
        detected = vit_flax.recognise(shapes, metadata, _stride(sizes))
        layout = detected.layout | resnet.flax_layout(shapes)
        assumed = (*detected.assumed, "epsilons")
        return dataclasses.replace(
            detected, options=detected.options | sizes, layout=layout, assumed=assumed
        )

    def rules(self, config: Config, layout: Mapping[str, Any]) -> list[Rule]:
        below = resnet.flax_rules("embedding/backbone", config.backbone, layout)
        # Last norm and head are the ViT's.
        return [*below, *super().rules(config, layout)]

    def layout(self, config: Config) -> dict:
        return super().layout(config) | dict(norm_axes=False, resnet="flax")


class Timm(vit_timm.Timm):
    """timm."""

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        inner = {
            name.removeprefix(_BACKBONE): shape
            for name, shape in shapes.items()
            if name.startswith(_BACKBONE)
        }
        if not inner:
            return None
        if "0.conv.weight" in inner:
            raise CheckpointError(
                "its patches come from a stem of convolutions (MobileCLIP's), which is not supported"
            )
        if "bn1.weight" in inner:
            raise CheckpointError(
                "its patches come from a ResNet with batch norms (timm's …_resnet26d_… and …_resnet50d_…), which is "
                "not supported: hybrids here are on ResNets with group norms (…_r26_…, …_r50_…)"
            )
        sizes = resnet.timm_sizes(inner)
        detected = vit_timm.recognise(shapes, metadata, _stride(sizes))
        options = detected.options | sizes | {"epsilons": "timm"}
        return dataclasses.replace(
            detected, options=options, assumed=(*detected.assumed, "epsilons")
        )

    def rules(self, config: Config, layout: Mapping[str, Any]) -> list[Rule]:
        below = resnet.timm_rules("embedding/backbone", _BACKBONE, config.backbone)
        return [*super().rules(config, layout), *below]

    def preprocessing(self, config: Config) -> Preprocessing:
        """As for the published models."""
        return Preprocessing(config.image_size)

    def architecture(self, config: Config, layout: Mapping[str, Any]) -> tuple[str, dict]:
        if config.units not in _IN_TIMM or config.width_factor != 1:
            raise CheckpointError(
                f"timm has no hybrid with units {config.units}: write a .safetensors file"
            )
        arguments = vit_new_timm.arguments(config, layout)
        if not config.units:
            arguments["patch_size"] = config.patch
        return _IN_TIMM[config.units], arguments


def _stride(sizes: Mapping[str, Any]) -> int:
    options = {name: sizes[name] for name in ("units", "width_factor")}
    return backbones.Config(contract.USUAL_IMAGE_SIZE, **options, preactivation=False).stride
