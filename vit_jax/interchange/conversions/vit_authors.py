"""ViTs with the names of their authors' own PyTorch code: DINOv3 by its rotary positions, CLIP's and SigLIP's image
towers by what they are, ViT-5 by its norms, else torchvision's.
"""

from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import (
    contract,
    vit_5,
    vit_dinov3,
    vit_new_towers,
    vit_open_clip,
    vit_torchvision,
)
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_DINOV3, _VIT_5 = vit_dinov3.DINOv3(), vit_5.Authors()
_TORCHVISION = vit_torchvision.TorchVision()
_BESIDE_TEXT = {"clip": vit_open_clip.Clip(), "siglip": vit_open_clip.SigLip()}


class Authors(contract.Conversion):
    """facebookresearch/dinov3, wangf3014/ViT-5, openai/CLIP, open_clip and torchvision."""

    renamed = (vit_dinov3.CHUNKS, vit_open_clip.RENAMED, *vit_torchvision.RENAMED)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        for conversion in (_VIT_5, _DINOV3, *_BESIDE_TEXT.values(), _TORCHVISION):
            if detected := conversion.recognise(shapes, metadata):
                return detected
        return None

    def of(self, config: PublishedViTConfig) -> contract.Conversion:
        if config.rope == "centred":
            return _DINOV3
        if kind := _BESIDE_TEXT.get(vit_new_towers.kind_of(config)):
            return kind
        return _VIT_5 if config.norm == "rms" else _TORCHVISION
