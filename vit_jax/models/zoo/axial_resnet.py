"""AxialResNet (ViT §D.6): a ResNet whose 3x3 convolutions are attention along each column, then along each
row, with relative positions of queries, keys and values (Axial-DeepLab, arXiv 2003.07853).

Source: google-research/scenic, projects/baselines/axial_resnet.py, whose decisions these are. Group norm and
standardised 1x1 convolutions stand around attention. It attends at the resolution that comes in, then averages over 2x2
where the stride is 2. The logits have no scale. The relative term of keys takes the key of the place that attends,
where Axial-DeepLab takes that of the place attended to.

Ours: at another resolution the tables of relative positions are interpolated linearly over the offsets.
"""

import dataclasses
import math
import re
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import recompute, stack
from vit_jax.compute.convolution import standardize
from vit_jax.compute.dense import dense
from vit_jax.models import classifier, contract
from vit_jax.models.contract import ModelOutput
from vit_jax.models.embeddings import corner_aligned
from vit_jax.models.layers import Kernel
from vit_jax.models.zoo import resnet
from vit_jax.models.zoo.resnet import EXPANSION, GROUPS, Stages

# Listed by `vit_jax models`; the other depths of `resnet.UNITS` work as well.
VARIANTS = ["AxialResNet-50"]
ACCURACY = {}  # none was published
SMOKE = ("axial.py:smoke-resnet", 97.8, 120)
EPSILON = 1e-4  # of the group norms


@dataclasses.dataclass(frozen=True)
class AxialResNetConfig(Stages, classifier.ClassifierConfig):
    """An AxialResNet."""

    convolutional: ClassVar[bool] = True
    image_kernels: ClassVar[tuple[str, ...]] = ("root/kernel",)

    heads: int = option(2, "attention heads", minimum=1, role="size")

    def __post_init__(self):
        super().__post_init__()
        if not self.units:
            raise ConfigError("model.units = (): there is at least one stage")
        channels = self.root_channels
        if channels % (2 * self.heads):
            raise ConfigError(
                f"{channels} channels cannot be split into {self.heads} heads whose queries are half as wide as "
                "their values"
            )

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Heights and widths of the feature maps: after the root, then after each stage."""
        maps = [tuple(-(-length // 4) for length in self.height_width)]
        for stage in range(len(self.units)):
            half = tuple(-(-length // 2) for length in maps[-1])
            maps.append(half if stage else maps[-1])
        return maps

    @property
    def tokens(self) -> int:
        """Places of the last feature map."""
        return math.prod(self.grids[-1])

    @property
    def layers(self) -> dict[str, int]:
        """The layers, from input to output, for layer-wise decay: every unit is one."""
        return self.unit_layers("stages")

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*super().inputs, "root_norm")

    def fit_parameter(
        self, name: str, target: "AxialResNetConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        if not name.endswith("/relative") or self.grids == target.grids:
            return None
        _, stage, part, axis, _ = name.split("/")
        number = int(stage) - (part == "first")
        length = target.grids[number][axis == "across"]
        return "linear", lambda x: resize_offsets(x, 2 * length - 1)

    def flops(self) -> int:
        """Operations of one image's forward pass: convolutions, attention and head only, a multiply-add
        counted as 2.
        """
        height, width = (-(-length // 2) for length in self.height_width)
        channels, products = self.root_channels, 0
        products += height * width * 49 * self.channels * channels
        for stage, count in enumerate(self.units):
            inner = self.root_channels * 2**stage
            outer = EXPANSION * inner
            for unit in range(count):
                before, after = self.grids[stage + (unit > 0)], self.grids[stage + 1]
                area, small = math.prod(before), math.prod(after)
                products += area * channels * inner + small * inner * outer
                products += small * channels * outer if unit == 0 else 0
                # Projections; of each place with each of its line: three terms of logits of half a head's
                # size, two of values.
                products += 2 * area * 2 * inner**2
                products += sum(before) * area * inner * 7 // 2
                channels = outer
        return 2 * (products + channels * self.num_classes)


def options_from_name(name: str) -> dict | None:
    """`AxialResNet-50` -> its depth; `None` for a name of another family."""
    match = re.fullmatch(r"AxialResNet-(.+)", name)
    if not match:
        return None
    classifier.check_size(name, "AxialResNet", match[1], resnet.UNITS)
    return dict(units=resnet.UNITS[match[1]])


def resize_offsets(table: jax.Array, offsets: int) -> jax.Array:
    """A table of relative positions (..., old offsets) at this number of offsets, between the same ends."""
    return (table @ corner_aligned(offsets, table.shape[-1]).T).astype(table.dtype)


class AxialResNet(classifier.Classifier):
    """Images to logits."""

    def __init__(self, config: AxialResNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.root = Convolution(config.channels, config.root_channels, 7, rngs)
        self.root_norm = _group_norm(config.root_channels, config, rngs)
        # Strings: integers would come back as such from some checkpoint formats only.
        self.stages = nnx.Dict(
            {str(i + 1): Stage(i, config, rngs=rngs) for i in range(len(config.units))}
        )
        if config.num_classes:
            self.head = classifier.head(config.outputs, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies images; returns and captures what `resnet.ResNet` does."""
        config = self.config
        classifier.check_images(images, config)
        x = nnx.relu(self.root_norm(self.root(images.astype(config.dtype), 2)))
        x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        captured = {"root": x}
        for name, stage in self.stages.items():
            x = stage(x)
            captured[f"stage{name}"] = x
        features = x.mean((1, 2))
        logits = self.classify(features)
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        return ModelOutput(logits, features, tokens, contract.captured(capture, **captured))


class Stage(resnet.Stage):
    """Units at one resolution: `first` changes it and the channels; the others are equal and stacked."""

    def __init__(self, index: int, config: AxialResNetConfig, *, rngs: nnx.Rngs):
        inner = config.root_channels * 2**index
        inputs = EXPANSION * inner // 2 if index else inner
        self.first = Unit(inputs, inner, 2 if index else 1, config.grids[index], config, rngs)
        make = lambda rngs: Unit(  # noqa: E731
            EXPANSION * inner, inner, 1, config.grids[index + 1], config, rngs
        )
        others = config.units[index] - 1
        self.layers = stack.stack(make, others, rngs) if others else None
        self.config = config


class Unit(nnx.Module):
    """1x1 convolution, attention along columns and then along rows, 1x1 convolution; with norms and ReLU,
    and added to its input, which a stride or other channels project.
    """

    def __init__(
        self,
        inputs: int,
        inner: int,
        stride: int,
        grid: tuple[int, int],
        config: AxialResNetConfig,
        rngs: nnx.Rngs,
    ):
        outputs = EXPANSION * inner
        self.conv1 = Convolution(inputs, inner, 1, rngs)
        self.norm1 = _group_norm(inner, config, rngs)
        self.down = RelativeAttention(inner, grid[0], config, rngs)
        self.across = RelativeAttention(inner, grid[1], config, rngs)
        self.conv3 = Convolution(inner, outputs, 1, rngs)
        # From zero: every unit begins as the identity.
        self.norm3 = _group_norm(outputs, config, rngs, nnx.initializers.zeros)
        self.stride, self.projects = stride, inputs != outputs or stride != 1
        if self.projects:
            self.shortcut = Convolution(inputs, outputs, 1, rngs)
            self.shortcut_norm = _group_norm(outputs, config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, h, w, C) -> (B, h', w', C')."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.across(self.down(y.swapaxes(1, 2)).swapaxes(1, 2))
        if self.stride == 2:
            y = nnx.avg_pool(y, (2, 2), strides=(2, 2), padding="SAME")
        y = self.norm3(self.conv3(nnx.relu(y)))
        return nnx.relu(
            y + (self.shortcut_norm(self.shortcut(x, self.stride)) if self.projects else x)
        )


class RelativeAttention(nnx.Module):
    """Attention in each line of a map, with learned vectors for each offset between two places, which
    stand beside queries, keys and values.

    Parameters: `qkv/kernel` (D, 2D) and `relative` (2D/H, 2N - 1), of a head's queries (C/2), keys (C/2) and
    values (C), one after the other, for H heads of size C; the heads share the table.
    """

    def __init__(self, width: int, length: int, config: AxialResNetConfig, rngs: nnx.Rngs):
        size = width // config.heads
        draw = nnx.initializers.normal(1 / width)
        self.qkv = Kernel(draw, (width, 2 * width), rngs)
        self.qkv_norm = _group_norm(2 * width, config, rngs)
        draw = nnx.initializers.normal(1 / size)
        self.relative = nnx.Param(draw(rngs.params(), (2 * size, 2 * length - 1)))
        self.out_norm = _group_norm(width, config, rngs)
        self.heads, self.length = config.heads, length

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, lines, N, D) -> the same."""
        size, places = x.shape[-1] // self.heads, np.arange(self.length)
        y = x.reshape(-1, *x.shape[2:])
        y = self.qkv_norm(recompute.keep(dense(y, self.qkv.kernel[...], None), recompute.HIDDEN))
        parts = [size // 2, size]
        q, k, v = jnp.split(y.reshape(*y.shape[:2], self.heads, 2 * size), parts, axis=-1)
        offsets = places[None] - places[:, None] + self.length - 1
        vectors = self.relative[...].astype(x.dtype)[:, offsets]
        of_q, of_k, of_v = jnp.split(vectors, parts)

        logits = (
            _sum("bihc,bjhc->bhij", q, k)
            + _sum("bihc,cij->bhij", q, of_k)
            + _sum("bihc,cij->bhij", k, of_q)
        )
        weights = jax.nn.softmax(logits, axis=-1).astype(x.dtype)
        y = _sum("bhij,bjhc->bihc", weights, v) + _sum("bhij,cij->bihc", weights, of_v)
        return self.out_norm(y.astype(x.dtype).reshape(-1, *x.shape[2:])).reshape(x.shape)


class Convolution(nnx.Module):
    """Convolution without bias whose kernel (size, size, inputs, outputs) is standardised (arXiv
    1903.10520).
    """

    def __init__(self, inputs: int, outputs: int, size: int, rngs: nnx.Rngs):
        init = nnx.initializers.lecun_normal(in_axis=(0, 1, 2), out_axis=3)
        self.kernel = nnx.Param(init(rngs.params(), (size, size, inputs, outputs)))

    def __call__(self, x: jax.Array, stride: int = 1) -> jax.Array:
        """(B, H, W, inputs) -> (B, H/stride, W/stride, outputs), rounded up."""
        kernel = standardize(self.kernel[...], preactivation=True).astype(x.dtype)
        return jax.lax.conv_general_dilated(
            x, kernel, (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )


def _sum(letters: str, *arrays: Any) -> jax.Array:
    return jnp.einsum(letters, *arrays, preferred_element_type=jnp.float32)


def _group_norm(
    channels: int, config: AxialResNetConfig, rngs: nnx.Rngs, scale_init=nnx.initializers.ones
) -> nnx.GroupNorm:
    return nnx.GroupNorm(
        channels,
        GROUPS,
        epsilon=EPSILON,
        # Over the few places of a line the mean of squares loses digits.
        use_fast_variance=False,
        scale_init=scale_init,
        dtype=jnp.dtype(config.dtype),
        rngs=rngs,
    )


Config, Model = AxialResNetConfig, AxialResNet  # for the registry
