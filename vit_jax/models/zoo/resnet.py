"""BiT and ResNet (arXiv 1912.11370): bottleneck ResNets with group norm and standardised weights.
`BiT-…` (big_vision's `bit_paper`) normalises before each convolution, as published BiT weights need it;
`ResNet-…` (its `bit`) after each, as the hybrids of the ViT papers do.

They also differ in how they standardise, pad and normalise, and published weights depend on these details.
"""

import dataclasses
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import choices, stack
from vit_jax.compute.convolution import standardize
from vit_jax.models import classifier, contract
from vit_jax.models.contract import ModelOutput

# Units of each stage (BiT §4; 26 is AugReg's).
UNITS = {
    "26": (2, 2, 2, 2),
    "50": (3, 4, 6, 3),
    "101": (3, 4, 23, 3),
    "152": (3, 8, 36, 3),
    "200": (3, 24, 36, 3),
}
# Listed by `vit_jax models`; any other depth and width work as well.
VARIANTS = [
    "BiT-R26x1", "BiT-R50x1", "BiT-R50x2", "BiT-R50x3", "BiT-R101x1", "BiT-R101x3", "BiT-R152x1", "BiT-R152x2",
    "BiT-R152x4", "BiT-R200x3",
    "ResNet-R26x1", "ResNet-R50x1", "ResNet-R50x2", "ResNet-R101x1", "ResNet-R152x1", "ResNet-R152x2",
]  # fmt: skip
ACCURACY = {
    "BiT-R50x1": 76.0
}  # Group norm and standardised weights, in BiT's ablation of batch norm.
SMOKE = ("digits.py:resnet", 99.7, 101)
GROUPS = 32
EPSILONS = ("official", "timm")
# A unit's outputs over its inner channels.
EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class Stages:
    """Options of networks with a ResNet's stages."""

    units: tuple = option(
        (3, 4, 6, 3),
        "residual units of each stage of the ResNet; each but the first has stride 2",
        role="size",
    )
    width_factor: float = option(
        1.0, "the ResNet's channels, as a multiple of 64 in its root and first stage", role="size"
    )

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "units", tuple(self.units))
        if any(count < 1 for count in self.units):
            raise ConfigError(f"model.units = {self.units}: every stage has at least one unit")
        if self.root_channels < GROUPS or self.root_channels % GROUPS:
            raise ConfigError(
                f"model.width_factor = {self.width_factor} gives {self.root_channels} channels, which cannot be "
                f"normalised in {GROUPS} groups: take a multiple of 0.5"
            )

    @property
    def root_channels(self) -> int:
        """Channels after the root."""
        return int(64 * self.width_factor)

    @property
    def outputs(self) -> int:
        """Channels of the last feature map."""
        if not self.units:
            return self.root_channels
        return self.root_channels * EXPANSION * 2 ** (len(self.units) - 1)

    def unit_layers(self, stages: str) -> dict[str, int]:
        """`classifier.ClassifierConfig.layers` of the stages with this name: every unit is a layer."""
        layers = {}
        for stage, count in enumerate(self.units, 1):
            layers[f"{stages}/{stage}/first"] = 1
            if count > 1:
                layers[f"{stages}/{stage}/layers"] = count - 1
        return layers


@dataclasses.dataclass(frozen=True)
class ResNetConfig(Stages, classifier.ClassifierConfig):
    """A ResNet. Images may have any size; what is counted here is for `image_size`."""

    convolutional: ClassVar[bool] = True
    image_kernels: ClassVar[tuple[str, ...]] = ("backbone/root/conv/kernel",)

    preactivation: bool = option(
        True,
        "normalise before each convolution (BiT, ResNet v2), not after it (ResNet v1)",
        role="size",
    )
    root_zeros: bool = option(
        False,
        "zeros around what BiT's root pools (BiT's first code, timm; not big_vision)",
        role="convention",
    )

    epsilons: str = option(
        "official",
        "those that group norms and kernels are normalised with; timm's move logits by 1e-4 in hybrids",
        choices=EPSILONS,
        role="convention",
    )

    def __post_init__(self):
        super().__post_init__()
        if self.root_zeros and not self.preactivation:
            raise ConfigError(
                "model.root_zeros is for BiT: in a ResNet v1 what is pooled is positive"
            )

    @property
    def stride(self) -> int:
        """Pixels from one place of the last feature map to the next."""
        return 4 * 2 ** max(len(self.units) - 1, 0)

    @property
    def grid(self) -> tuple[int, int]:
        """Height and width of the last feature map."""
        height, width = self.height_width
        return -(-height // self.stride), -(-width // self.stride)

    @property
    def tokens(self) -> int:
        """Places of the last feature map."""
        return self.grid[0] * self.grid[1]

    @property
    def layers(self) -> dict[str, int]:
        """The layers, from input to output, for layer-wise decay: every unit is one."""
        return self.unit_layers("backbone/stages")

    def flops(self) -> int:
        """Operations of one image's forward pass: convolutions and head only, a multiply-add
        counted as 2.
        """

        def halved(size: tuple[int, int]) -> tuple[int, int]:
            return -(-size[0] // 2), -(-size[1] // 2)

        size, channels = halved(self.height_width), self.root_channels
        products = math.prod(size) * 7 * 7 * self.channels * channels
        size = halved(size)
        for stage, count in enumerate(self.units):
            inner = self.root_channels * 2**stage
            outer = EXPANSION * inner
            products += math.prod(size) * channels * inner
            size = size if stage == 0 else halved(size)
            area = math.prod(size)
            products += area * (channels * outer + 9 * inner**2 + inner * outer)
            products += area * (count - 1) * (outer * inner + 9 * inner**2 + inner * outer)
            channels = outer
        return 2 * (products + channels * self.num_classes)


def options_from_name(name: str) -> dict | None:
    """`BiT-R50x1` or `ResNet-R50x1` -> its style, depth and width; `None` for a name of another
    family.
    """
    match = re.fullmatch(r"(BiT|ResNet)-R(\d+)x(\d+)", name)
    if not match:
        return None
    style, depth, width_factor = match.groups()
    classifier.check_size(name, "ResNet", depth, UNITS)
    return dict(units=UNITS[depth], width_factor=float(width_factor), preactivation=style == "BiT")


class ResNet(classifier.Classifier):
    """Images to logits."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.backbone = Backbone(config, rngs=rngs)
        if config.preactivation:
            self.norm = _group_norm(config.outputs, config, rngs)
        if config.num_classes:
            self.head = classifier.head(config.outputs, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies images (B, H, W, C) of any size. Captured are the feature maps (B, h, w, C): `root`, `stage1`, …

        Returns:
          `tokens` are the places of the last feature map, row by row, and `features` their mean.
        """
        x, captured = self.backbone(images)
        if self.config.preactivation:
            x = nnx.relu(self.norm(x))
        features = x.mean(axis=(1, 2))
        logits = self.classify(features)
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        return ModelOutput(logits, features, tokens, contract.captured(capture, **captured))

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        """A stage's map after the last norm: of a BiT's last stage, with the ReLU after it; others as they are."""
        is_last = layer == f"stage{len(self.config.units)}"
        return nnx.relu(self.norm(x)) if self.config.preactivation and is_last else x


class Backbone(nnx.Module):
    """Root and stages: images to the last feature map."""

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.root = Root(config, rngs=rngs)
        # Strings: integers would come back as such from some checkpoint formats only.
        self.stages = nnx.Dict(
            {str(i + 1): Stage(i, config, rngs=rngs) for i in range(len(config.units))}
        )

    def __call__(self, images: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """images (B, H, W, 3) -> (B, h, w, C), and the maps after root and stages, which cost
        nothing unless used.
        """
        x = self.root(images)
        maps = {"root": x}
        for name, stage in self.stages.items():
            x = stage(x)
            maps[f"stage{name}"] = x
        return x, maps


class Root(nnx.Module):
    """7x7 convolution and 3x3 max pooling, each of stride 2; the norm and ReLU between them are for
    ResNet v1 alone.
    """

    def __init__(self, config: ResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.conv = Convolution(config.channels, config.root_channels, 7, 2, config, rngs=rngs)
        if not config.preactivation:
            self.norm = _group_norm(config.root_channels, config, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """images (B, H, W, 3) -> (B, H/4, W/4, C)."""
        x = self.conv(images.astype(self.config.dtype))
        if not self.config.preactivation:
            x = nnx.relu(self.norm(x))
        if self.config.root_zeros:
            # Not the same as no border: without a ReLU before, all may be negative.
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
            return nnx.max_pool(x, (3, 3), strides=(2, 2))
        return nnx.max_pool(x, (3, 3), strides=(2, 2), padding=_padding(3, self.config))


class Stage(nnx.Module):
    """Residual units at one resolution: `first` changes it and the channels; the others are equal
    and stacked.
    """

    def __init__(self, index: int, config: ResNetConfig, *, rngs: nnx.Rngs):
        unit = PreactivationUnit if config.preactivation else PostactivationUnit
        inner = config.root_channels * 2**index
        outputs = EXPANSION * inner
        others = config.units[index] - 1
        if index == 0:
            self.first = unit(config.root_channels, inner, 1, config, rngs=rngs)
        else:
            self.first = unit(outputs // 2, inner, 2, config, rngs=rngs)
        make = lambda rngs: unit(outputs, inner, 1, config, rngs=rngs)  # noqa: E731
        self.layers = stack.stack(make, others, rngs) if others else None
        self.config = config

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, h, w, C) -> (B, h', w', C')."""
        remat = choices.remat(self.config)
        x = stack.call(self.first, x, remat=remat)
        if self.layers is None:
            return x
        step = lambda unit, x: (unit(x), None)  # noqa: E731
        return stack.scan(step, self.layers, x, remat=remat, unroll=self.config.unroll)[0]


class PreactivationUnit(nnx.Module):
    """Norm, ReLU, convolution, thrice (ResNet v2, arXiv 1603.05027); projected shortcuts leave
    after the first ReLU.
    """

    def __init__(
        self, inputs: int, inner: int, stride: int, config: ResNetConfig, *, rngs: nnx.Rngs
    ):
        outputs = EXPANSION * inner
        self.norm1 = _group_norm(inputs, config, rngs)
        self.conv1 = Convolution(inputs, inner, 1, 1, config, rngs=rngs)
        self.norm2 = _group_norm(inner, config, rngs)
        self.conv2 = Convolution(inner, inner, 3, stride, config, rngs=rngs)
        self.norm3 = _group_norm(inner, config, rngs)
        self.conv3 = Convolution(inner, outputs, 1, 1, config, rngs=rngs)
        self.projects = inputs != outputs or stride != 1
        if self.projects:
            self.shortcut = Convolution(inputs, outputs, 1, stride, config, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, h, w, C) -> (B, h', w', C')."""
        y = nnx.relu(self.norm1(x))
        shortcut = self.shortcut(y) if self.projects else x
        y = self.conv1(y)
        y = self.conv2(nnx.relu(self.norm2(y)))
        return self.conv3(nnx.relu(self.norm3(y))) + shortcut


class PostactivationUnit(nnx.Module):
    """Convolution and norm, thrice, with ReLU between them and after the sum (ResNet v1, arXiv
    1512.03385).
    """

    def __init__(
        self, inputs: int, inner: int, stride: int, config: ResNetConfig, *, rngs: nnx.Rngs
    ):
        outputs = EXPANSION * inner
        self.conv1 = Convolution(inputs, inner, 1, 1, config, rngs=rngs)
        self.norm1 = _group_norm(inner, config, rngs)
        self.conv2 = Convolution(inner, inner, 3, stride, config, rngs=rngs)
        self.norm2 = _group_norm(inner, config, rngs)
        self.conv3 = Convolution(inner, outputs, 1, 1, config, rngs=rngs)
        # From zero: every unit begins as the identity.
        self.norm3 = _group_norm(outputs, config, rngs, nnx.initializers.zeros)
        self.projects = inputs != outputs or stride != 1
        if self.projects:
            self.shortcut = Convolution(inputs, outputs, 1, stride, config, rngs=rngs)
            self.shortcut_norm = _group_norm(outputs, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, h, w, C) -> (B, h', w', C')."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = nnx.relu(self.norm2(self.conv2(y)))
        y = self.norm3(self.conv3(y))
        return nnx.relu(y + (self.shortcut_norm(self.shortcut(x)) if self.projects else x))


class Convolution(nnx.Module):
    """Convolution without bias whose kernel (size, size, inputs, outputs) is standardised (arXiv
    1903.10520).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        size: int,
        stride: int,
        config: ResNetConfig,
        *,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)
        self.kernel = nnx.Param(init(rngs.params(), (size, size, inputs, outputs)))
        self.stride, self.padding = stride, _padding(size, config)
        self.preactivation, self.epsilons = config.preactivation, config.epsilons

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, H, W, inputs) -> (B, H/stride, W/stride, outputs), rounded up."""
        kernel = standardize(self.kernel[...], self.preactivation, self.epsilons).astype(x.dtype)
        return jax.lax.conv_general_dilated(
            x, kernel, (self.stride,) * 2, self.padding, dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


def _padding(size: int, config: ResNetConfig) -> str | tuple:
    """TensorFlow's SAME puts the odd row last; BiT pads both sides alike. They differ where the
    stride is 2.
    """
    return ((size // 2,) * 2,) * 2 if config.preactivation else "SAME"


def _group_norm(
    channels: int, config: ResNetConfig, rngs: nnx.Rngs, scale_init=nnx.initializers.ones
) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        GROUPS,
        epsilon=1e-5 if config.preactivation or config.epsilons == "timm" else 1e-6,
        # BiT's weights notice how the variance is computed (comment in bit_paper).
        use_fast_variance=not config.preactivation,
        scale_init=scale_init,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


Config, Model = ResNetConfig, ResNet  # for the registry
