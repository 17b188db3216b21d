"""EfficientNet (arXiv 1905.11946): inverted residuals with depth-wise convolutions and squeeze-excite,
scaled in depth, width and resolution together; up to L2, the network of Noisy Student (arXiv 1911.04252).

Sources: the papers and the code of tensorflow/tpu (models/official/efficientnet), whose conventions these are. Padding
is TensorFlow's SAME, which puts the odd zero last. Batch norm has an epsilon of 1e-3 and a momentum of 0.99. Stochastic
depth falls short of its full rate by one block.

Ours: the head begins as in the other families, in that code uniform.
"""

import dataclasses
import functools
import itertools
import math
import re
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import choices, convolution, partitioning, recompute, stack
from vit_jax.compute.dense import dense
from vit_jax.compute.dropout import draw_key, drop_path, dropout, split
from vit_jax.models import batch_norm, classifier, contract
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layers import Kernel, SqueezeExcite


class Stage(NamedTuple):
    """Of EfficientNet-B0: how many blocks, the side of their kernels, the stride of the first, how
    many times wider they are inside, and the channels that they give.
    """

    units: int
    kernel: int
    stride: int
    expansion: int
    channels: int


STAGES = (
    Stage(1, 3, 1, 1, 16),
    Stage(2, 3, 2, 6, 24),
    Stage(2, 5, 2, 6, 40),
    Stage(3, 3, 2, 6, 80),
    Stage(3, 5, 1, 6, 112),
    Stage(4, 5, 2, 6, 192),
    Stage(1, 3, 1, 6, 320),
)
ROOT, TOP = 32, 1280  # channels of the first and of the last convolution
DIVISOR = 8  # of all channels


class Size(NamedTuple):
    """Factors of width and depth, the resolution in pixels, and dropout before the head."""

    width: float
    depth: float
    resolution: int
    dropout: float


# L2 is trained at 475 pixels.
SIZES = {
    "B0": Size(1.0, 1.0, 224, 0.2),
    "B1": Size(1.0, 1.1, 240, 0.2),
    "B2": Size(1.1, 1.2, 260, 0.3),
    "B3": Size(1.2, 1.4, 300, 0.3),
    "B4": Size(1.4, 1.8, 380, 0.4),
    "B5": Size(1.6, 2.2, 456, 0.4),
    "B6": Size(1.8, 2.6, 528, 0.5),
    "B7": Size(2.0, 3.1, 600, 0.5),
    "L2": Size(4.3, 5.3, 800, 0.5),
}
VARIANTS = [f"EfficientNet-{size}" for size in SIZES]
# As students of Noisy Student, which learn from 300 million more images.
ACCURACY = dict(zip(VARIANTS, (78.8, 81.5, 82.4, 84.1, 85.3, 86.1, 86.4, 86.9, 88.4), strict=True))
SMOKE = ("efficientnet.py:smoke", 99.4, 113)
EPSILON, MOMENTUM = 1e-3, 0.01  # of the batch norms; the momentum as PyTorch counts it


def units(depth: float) -> tuple[int, ...]:
    """The blocks of each stage of a network `depth` times as deep as B0."""
    return tuple(math.ceil(depth * stage.units) for stage in STAGES)


def scaled(channels: int, width: float) -> int:
    """`width` times as many channels, as a multiple of 8 that is not below nine tenths of that."""
    wanted = channels * width
    rounded = max(DIVISOR, int(wanted + DIVISOR / 2) // DIVISOR * DIVISOR)
    return rounded + DIVISOR * (rounded < 0.9 * wanted)


class Shape(NamedTuple):
    """Of a block, see `EfficientNetConfig.blocks`.

    Attributes:
      name: of its parameters; those that end in `layers` stand for all further ones of a stage.
      count: how many blocks these are.
      first: their number in the network, counted from 0.
    """

    name: str
    count: int
    first: int
    inputs: int
    outputs: int
    kernel: int
    stride: int
    expansion: int

    @property
    def inner(self) -> int:
        """Channels inside."""
        return self.inputs * self.expansion

    @property
    def squeezed(self) -> int:
        """Hidden channels of the gate, a quarter of those that come in."""
        return max(1, self.inputs // 4)


@dataclasses.dataclass(frozen=True)
class EfficientNetConfig(batch_norm.BatchNormConfig):
    """An EfficientNet. Images may have any size; what is counted here is for `image_size`."""

    convolutional: ClassVar[bool] = True
    image_kernels: ClassVar[tuple[str, ...]] = ("root/kernel",)
    tensor_rules = (
        (r".*/(expand|depthwise|gate/expand)/kernel", -1),
        (r".*/(expand|depthwise)_norm/(scale|bias|mean|var)", -1),
        (r".*/gate/expand/bias", -1),
        (r".*/(project|gate/reduce)/kernel", -2),
    )

    units: tuple = option(
        units(1.0),
        "blocks of each stage of the EfficientNet, at most seven of them; the first may have stride 2",
        role="size",
    )
    width_factor: float = option(
        1.0, "the EfficientNet's channels, as a multiple of B0's", above=0, role="size"
    )
    dropout: float = option(0.0, "before the head", minimum=0, below=1)
    drop_path: float = option(
        0.0,
        "stochastic depth, growing linearly from 0 in the first block to this after the last",
        minimum=0,
        below=1,
    )

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "units", tuple(self.units))
        if not 0 < len(self.units) <= len(STAGES) or min(self.units) < 1:
            raise ConfigError(
                f"model.units = {self.units}: an EfficientNet has one to {len(STAGES)} stages, each of at least "
                "one block"
            )

    @property
    def blocks(self) -> list[Shape]:
        """All blocks in their order; equal ones that follow each other are one of these."""
        shapes, inputs, before = [], scaled(ROOT, self.width_factor), 0
        for number, (count, stage) in enumerate(zip(self.units, STAGES, strict=False), 1):
            outputs = scaled(stage.channels, self.width_factor)
            name, inside = f"stages/{number}", (stage.kernel, stage.stride, stage.expansion)
            shapes.append(Shape(f"{name}/first", 1, before, inputs, outputs, *inside))
            if count > 1:
                inside = (stage.kernel, 1, stage.expansion)
                others = Shape(f"{name}/layers", count - 1, before + 1, outputs, outputs, *inside)
                shapes.append(others)
            inputs, before = outputs, before + count
        return shapes

    @property
    def outputs(self) -> int:
        """Channels of the last feature map."""
        return scaled(TOP, self.width_factor)

    @property
    def grids(self) -> list[tuple[int, int]]:
        """Heights and widths of the feature maps: after the root, then after each of `blocks`."""
        strides = [2, *(block.stride for block in self.blocks)]
        halve = lambda size, stride: tuple(-(-length // stride) for length in size)  # noqa: E731
        return list(itertools.accumulate(strides, halve, initial=self.height_width))[1:]

    @property
    def tokens(self) -> int:
        """Places of the last feature map."""
        return math.prod(self.grids[-1])

    @property
    def layers(self) -> dict[str, int]:
        """The layers, from input to output, for layer-wise decay: every block is one."""
        return {block.name: block.count for block in self.blocks}

    def flops(self) -> int:
        """Operations of one image's forward pass: convolutions, gates and head only, a multiply-add
        counted as 2.
        """
        grids = [math.prod(grid) for grid in self.grids]
        blocks = self.blocks
        products = grids[0] * 9 * self.channels * blocks[0].inputs
        for block, (before, after) in zip(blocks, itertools.pairwise(grids), strict=True):
            widened = before * block.inputs * block.inner if block.expansion > 1 else 0
            deep = after * block.inner * (block.kernel**2 + block.outputs)
            products += block.count * (widened + deep + 2 * block.inner * block.squeezed)
        products += grids[-1] * blocks[-1].outputs * self.outputs
        return 2 * (products + self.outputs * self.num_classes)


def options_from_name(name: str) -> dict | None:
    """`EfficientNet-B0` -> its depth, width and resolution; `None` for a name of another family."""
    match = re.fullmatch(r"EfficientNet-(.+)", name)
    if not match:
        return None
    classifier.check_size(name, "EfficientNet", match[1], SIZES)
    size = SIZES[match[1]]
    return dict(units=units(size.depth), width_factor=size.width, image_size=size.resolution)


class EfficientNet(classifier.Classifier):
    """Images to logits."""

    def __init__(self, config: EfficientNetConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.root = Root(config.channels, scaled(ROOT, config.width_factor), rngs=rngs)
        stages = {}
        for shape in config.blocks:
            _, stage, part = shape.name.split("/")
            make = functools.partial(MBConv, shape, config)
            block = make(rngs) if part == "first" else stack.stack(make, shape.count, rngs)
            stages.setdefault(stage, {})[part] = block
        # Strings: integers would come back as such from some checkpoint formats only.
        self.stages = nnx.Dict({name: nnx.Dict(parts) for name, parts in stages.items()})
        self.top = Kernel(_INIT, (config.blocks[-1].outputs, config.outputs), rngs)
        self.top_norm = _norm(config.outputs)
        if config.num_classes:
            self.head = classifier.head(config.outputs, config, rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies images (B, H, W, C) of any size. Captured are the feature maps (B, h, w, C): `root`, `stage1`, …

        Returns:
          `tokens` are the places of the last feature map, row by row, and `features` their mean.
        """
        config = self.config
        path_key, head_key = split(
            draw_key(rngs, deterministic, config.dropout, config.drop_path), 2
        )
        training = not deterministic and not config.fixed_statistics

        root = self.root(images.astype(config.dtype), training=training)
        x, maps = self._stages(root, path_key if config.drop_path else None, training)
        x = nnx.silu(self.top_norm(dense(x, self.top.kernel[...], None), training=training))
        features = x.mean((1, 2))
        logits = None
        if config.num_classes:
            logits = self.head(dropout(features.astype(jnp.float32), config.dropout, head_key))
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        return ModelOutput(logits, features, tokens, contract.captured(capture, root=root, **maps))

    def _stages(
        self, x: jax.Array, key: jax.Array | None, training: bool
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """All blocks: (B, h, w, C) -> (B, h', w', D), and the maps after each stage."""
        config, remat = self.config, choices.remat(self.config)
        total = sum(config.units)
        rates = config.drop_path * np.arange(total, dtype=np.float32) / total
        keys = None if key is None else jax.random.split(key, total)
        step = lambda block, x, rate, key: (block(x, rate, key, training), None)  # noqa: E731
        maps = {}
        for shape in config.blocks:
            _, stage, part = shape.name.split("/")
            block, these = self.stages[stage][part], slice(shape.first, shape.first + shape.count)
            arguments = rates[these], None if keys is None else keys[these]
            if part == "first":
                rate, key = jax.tree.map(lambda x: x[0], arguments)
                x = stack.call(block, x, rate, key, training=training, remat=remat)
            else:
                x, _ = stack.scan(step, block, x, arguments, remat=remat, unroll=config.unroll)
            maps[f"stage{stage}"] = x
        return x, maps


class Root(nnx.Module):
    """3x3 convolution of stride 2, batch norm, swish; `kernel` (3, 3, inputs, outputs)."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.kernel = nnx.Param(_INIT(rngs.params(), (3, 3, inputs, outputs)))
        self.norm = _norm(outputs)

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        """(B, H, W, C) -> (B, H/2, W/2, outputs), rounded up."""
        x = jax.lax.conv_general_dilated(
            x,
            self.kernel[...].astype(x.dtype),
            (2, 2),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        return nnx.silu(self.norm(x, training=training))


class MBConv(nnx.Module):
    """Wider by a 1x1 convolution, depth-wise convolution, squeeze-excite, narrower by a 1x1 convolution;
    a batch norm after each convolution, swish after the first two. It is added to its input where it
    leaves this its shape.

    Parameters: `expand/kernel` (C, M), absent where M = C; `depthwise/kernel` (S, S, 1, M);
    `project/kernel` (M, D).
    """

    def __init__(self, shape: Shape, config: EfficientNetConfig, rngs: nnx.Rngs):
        if shape.expansion > 1:
            self.expand = Kernel(_INIT, (shape.inputs, shape.inner), rngs)
            self.expand_norm = _norm(shape.inner)
        draw = nnx.initializers.variance_scaling(2.0, "fan_in", "normal")
        self.depthwise = Kernel(draw, (shape.kernel, shape.kernel, 1, shape.inner), rngs)
        self.depthwise_norm = _norm(shape.inner)
        self.gate = SqueezeExcite(
            shape.inner,
            shape.squeezed,
            nnx.silu,
            nnx.sigmoid,
            kernel_init=_INIT,
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )
        self.project = Kernel(_INIT, (shape.inner, shape.outputs), rngs)
        self.project_norm = _norm(shape.outputs)
        self.expands, self.stride = shape.expansion > 1, shape.stride
        self.adds = shape.stride == 1 and shape.inputs == shape.outputs

    def __call__(
        self, x: jax.Array, drop_path_rate: jax.Array, key: jax.Array | None, training: bool
    ) -> jax.Array:
        """(B, h, w, C) -> (B, h', w', D)."""
        y = x
        if self.expands:
            y = recompute.keep(dense(y, self.expand.kernel[...], None), recompute.HIDDEN)
            y = nnx.silu(self.expand_norm(y, training=training))
        kernel = partitioning.gather_kernel(self.depthwise.kernel[...])
        y = convolution.depthwise(y, kernel, self.stride)
        y = self.gate(nnx.silu(self.depthwise_norm(y, training=training)))
        y = self.project_norm(dense(y, self.project.kernel[...], None), training=training)
        return x + drop_path(y, drop_path_rate, key) if self.adds else y


# Of kernels whose last axis is their outputs: normal, of variance 2 over the outputs that an input meets.
_INIT = nnx.initializers.variance_scaling(2.0, "fan_out", "normal")


def _norm(channels: int) -> BatchNorm:
    return BatchNorm(channels, epsilon=EPSILON, momentum=MOMENTUM)


Config, Model = EfficientNetConfig, EfficientNet  # for the registry
