"""ViTs with the names of their authors' own PyTorch code: DINOv3 by its rotary positions, else ViT-5."""

from collections.abc import Mapping
from typing import Any

from vit_jax.interchange.conversions import contract, vit_5, vit_dinov3
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_DINOV3, _VIT_5 = vit_dinov3.DINOv3(), vit_5.Authors()


class Authors(contract.Conversion):
    """facebookresearch/dinov3 and wangf3014/ViT-5."""

    renamed = (vit_dinov3.CHUNKS,)

    def recognise(
        self, shapes: contract.Shapes, metadata: Mapping[str, Any]
    ) -> contract.DetectedModel | None:
        return _VIT_5.recognise(shapes, metadata) or _DINOV3.recognise(shapes, metadata)

    def of(self, config: PublishedViTConfig) -> contract.Conversion:
        return _DINOV3 if config.rope == "centred" else _VIT_5
