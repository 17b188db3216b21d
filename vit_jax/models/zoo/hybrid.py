"""Hybrid (ViT §3.1 "Hybrid architecture"; R and R26 from AugReg, arXiv 2106.10270): a ViT on the feature
map of a ResNet.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, option
from vit_jax.models import classifier
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.models.zoo import resnet, vit_zoo
from vit_jax.models.zoo.vit_zoo import PublishedViT
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

# Listed by `vit_jax models`.
VARIANTS = [
    "R+ViT-Ti/16", "R26+ViT-S/32", "R26+ViT-B/32", "R50+ViT-B/32", "R50+ViT-B/16", "R50+ViT-L/32", "R50+ViT-L/16",
]  # fmt: skip
# AugReg Table 3, "i1k up".
ACCURACY = {"R+ViT-Ti/16": 70.1, "R26+ViT-S/32": 79.6, "R50+ViT-L/32": 76.8}
SMOKE = ("digits.py:hybrid", 98.9, 141)


@dataclasses.dataclass(frozen=True)
class HybridViTConfig(resnet.Stages, PublishedViTConfig):
    """A ViT that sees the last feature map of a ResNet v1 in place of the image; `patch` counts
    places of that map.
    """

    convolutional: ClassVar[bool] = True
    image_kernels: ClassVar[tuple[str, ...]] = ("embedding/backbone/root/conv/kernel",)
    crop_to_patches: ClassVar[bool] = False
    native_resize: ClassVar[str] = "bilinear"
    native_aspect: ClassVar[bool] = False
    fixed_size_reason = "its patches are those of a ResNet's map of the whole image"

    epsilons: str = option(
        "official",
        "those that its ResNet is normalised with; timm's move logits by 1e-4",
        choices=resnet.EPSILONS,
        role="convention",
    )

    def __post_init__(self):
        resnet.Stages.__post_init__(self)
        PublishedViTConfig.__post_init__(self)
        stride = self.backbone.stride * self.patch
        if any(side % stride for side in self.height_width):
            raise ConfigError(
                f"image size {sizes.size_text(self.image_size)} does not fit a hybrid of total stride {stride}: "
                "take a multiple of that"
            )

    @property
    def backbone(self) -> resnet.ResNetConfig:
        """The ResNet below."""
        return resnet.ResNetConfig(
            self.image_size,
            num_classes=0,
            units=self.units,
            width_factor=self.width_factor,
            preactivation=False,
            epsilons=self.epsilons,
            dtype=self.dtype,
            remat=self.remat,
            unroll=self.unroll,
            dtype_on_cpu=self.dtype_on_cpu,
            channels=self.channels,
        )

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        height, width = self.backbone.grid
        return height // self.patch, width // self.patch

    def fit_parameter(
        self, name: str, target: "HybridViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How a parameter becomes that of `target`; patches of a map of features are not resized."""
        if name == "embedding/kernel":
            return None
        return super().fit_parameter(name, target, resize=resize)

    def flops(self) -> int:
        """Operations of one image's forward pass, counted as in the two parts."""
        rows, columns = self.grid
        deeper = self.backbone.outputs - self.channels
        deeper_patches = 2 * rows * columns * self.patch**2 * deeper * self.width
        return self.backbone.flops() + super().flops() + deeper_patches


def options_from_name(name: str) -> dict | None:
    """`R50+ViT-B/16` -> its ResNet and its ViT; `None` for a name of another family.

    The number after the slash is the total stride: 32 with four stages, 16 with the fourth's units
    moved to the third. `R` is the ResNet's root alone under patches of 8; its name says 16, its
    published weights have stride 32.
    """
    match = re.fullmatch(r"R(\d*)\+(ViT-.+/)(\d+)", name)
    if not match:
        return None
    depth, size, stride = match.groups()
    known = [variant for variant in VARIANTS if variant.startswith(f"R{depth}+")] or VARIANTS
    if depth:
        classifier.check_size(name, "ResNet", depth, resnet.UNITS)
    if stride not in (("16", "32") if depth else ("16",)):
        raise ConfigError(
            f"model {name!r}: there is no such hybrid of total stride {stride}{nearest(name, known)}"
        )
    if not depth:
        return vit_zoo.options_from_name(size + "8") | dict(units=())
    units = resnet.UNITS[depth]
    return vit_zoo.options_from_name(size + "1") | dict(
        units=units if stride == "32" else (*units[:2], sum(units[2:]))
    )


class HybridViT(PublishedViT):
    """Images to logits, as `PublishedViT`."""

    def __init__(self, config: HybridViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        self.embedding = Embedding(config, rngs=rngs)


class Embedding(PatchEmbedding):
    """Patches of a ResNet's last feature map; beside the patches' `kernel` and `bias` stand the
    ResNet's parameters.
    """

    def __init__(self, config: HybridViTConfig, *, rngs: nnx.Rngs):
        super().__init__(
            config.patch,
            config.backbone.outputs,
            config.width,
            bias=config.patch_bias,
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )
        self.backbone = resnet.Backbone(config.backbone, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """images (B, S, S, 3) -> tokens (B, N, D), row by row."""
        feature_map, _ = self.backbone(images)
        return super().__call__(feature_map)


Config, Model = HybridViTConfig, HybridViT  # for the registry
