"""DeepViT (arXiv 2103.11886): a ViT whose deep blocks mix the attention maps of their heads, since in
deep plain ones the maps become alike.

Sources: the paper and the authors' code (zhoudaquan/dvit_repo). Where these differ, the code decides. Maps are
normalised after Θ wherever there is a Θ, though the README lists the plain sizes without (`reattention_norm=False`).
DeepViT-L has 58,883,708 parameters, where the README prints 48.1 M.

Ours: linear layers begin as in the other families, Xavier-uniform, in that code normal with std 0.02. Tensor
parallelism shards heads here too, though Θ then has to gather the maps of all.
"""

import dataclasses
import re
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import attend, choices, stack
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import batch_norm, classifier, pooling, stacked
from vit_jax.models.attention import Attention, attention_flops
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.models.layers import Mlp, layer_norm, mlp_flops
from vit_jax.models.zoo.reattention import ReAttention

_DEEP = dict(conv_stem=True, residual_scale=0.5)
# The authors' code; all have patches of 16 pixels, 12 heads, and MLPs three times as wide as a token.
SIZES = {
    "16": dict(stages=(0, 16), width=384),
    "24": dict(stages=(0, 24), width=384),
    "32": dict(stages=(0, 32), width=384),
    "S": dict(stages=(11, 5), width=396, scaled_maps=True, **_DEEP),
    "L": dict(stages=(20, 12), width=420, **_DEEP),
}
VARIANTS = [f"DeepViT-{size}" for size in SIZES]
ACCURACY = dict(zip(VARIANTS, (79.1, 80.0, 80.9, 82.3, 83.1), strict=True))
SMOKE = ("deepvit.py:smoke", 98.1, 214)
STEM_CHANNELS = 64


@dataclasses.dataclass(frozen=True)
class DeepViTConfig(stacked.StackedConfig, batch_norm.BatchNormConfig):
    """A DeepViT."""

    activation: ClassVar[str] = "gelu"
    depth: ClassVar[int]  # the sum of the stages

    stages: tuple = option(
        (0, 16),
        "how many blocks have no re-attention, how many after them have it, and so on by turns",
        minimum=0,
        role="size",
    )
    width: int = option(384, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(1152, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(12, "attention heads", minimum=1, role="size")
    conv_stem: bool = option(
        False,
        "two convolutions with batch norm before the patches (DeepViT-S, L)",
        role="structure",
    )
    reattention_norm: bool = option(
        True, "batch norm of the attention maps after Θ", role="structure"
    )
    scaled_maps: bool = option(
        False,
        "maps after Θ are divided by the root of a head's size (DeepViT-S)",
        role="convention",
    )
    residual_scale: float = option(
        1.0,
        "a in x + f(norm(a x)) / a, of attention and MLP (DeepViT-S, L: 0.5)",
        above=0,
        role="convention",
    )
    attention: str = option(
        "auto",
        "how attention is computed where there is no Θ; all give the same. cudnn: GPU, 16 bits; "
        "splash: TPU",
        choices=attend.IMPLEMENTATIONS,
        role="compute",
    )

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "stages", tuple(self.stages))
        classifier.check_heads(self)
        super().__post_init__()
        if not self.depth or any(not isinstance(count, int) for count in self.stages):
            raise ConfigError(
                f"model.stages = {self.stages}: give how many blocks have no re-attention, how many have "
                "it, and so on, such as (11, 5)"
            )
        if self.conv_stem and self.patch % 2:
            raise ConfigError(
                f"model.conv_stem halves the image before it is cut: patches of {self.patch} pixels "
                "cannot be, choose an even size"
            )

    @property
    def convolutional(self) -> bool:
        """Whether the stem is made of convolutions."""
        return self.conv_stem

    @property
    def image_kernels(self) -> tuple[str, ...]:
        """The kernel whose last axis but one runs over the channels of the images: the stem's, or the patches'."""
        return ("embedding/stem/conv1/kernel",) if self.conv_stem else ("embedding/kernel",)

    @property
    def pool_heads(self) -> int:
        return self.heads

    @property
    def depth(self) -> int:
        """Number of blocks."""
        return sum(self.stages)

    @property
    def named_stages(self) -> dict[str, tuple[int, bool]]:
        """By name, how many blocks a stage has, and whether they have re-attention."""
        stages = [(count, bool(i % 2)) for i, count in enumerate(self.stages) if count]
        # Strings: integers would come back as such from some checkpoint formats only.
        return {str(i): stage for i, stage in enumerate(stages, 1)}

    @property
    def layers(self) -> dict[str, int]:
        return {f"stages/{name}/layers": count for name, (count, _) in self.named_stages.items()}

    def fit_parameter(
        self, name: str, target: "DeepViTConfig", *, resize: str
    ) -> tuple[str, Callable] | None:
        """How a parameter becomes that of `target`; patches of a stem's features are not resized."""
        embedding = name.startswith("embedding/")
        if self.conv_stem and embedding:
            return None
        return super().fit_parameter(name, target, resize=resize)

    def block_flops(self) -> int:
        """Operations of one block without the mixing of maps by Θ."""
        n, d = self.tokens, self.width
        return attention_flops(n, d) + mlp_flops(n, d, self.mlp_dim)

    def flops(self) -> int:
        """Operations of one image's forward pass, with the stem and the mixing of maps."""
        mixing = 2 * self.tokens**2 * self.heads**2 * sum(self.stages[1::2])
        if not self.conv_stem:
            return super().flops() + mixing
        places = self.grid[0] * self.grid[1] * (self.patch // 2) ** 2
        stem = 2 * places * STEM_CHANNELS * (7 * 7 * self.channels + 3 * 3 * STEM_CHANNELS)
        patches = 2 * places * (STEM_CHANNELS - 4 * self.channels) * self.width
        return super().flops() + stem + patches + mixing


def options_from_name(name: str) -> dict | None:
    """`DeepViT-S` -> its size; `None` for a name of another family."""
    match = re.fullmatch(r"DeepViT-(.+)", name)
    if not match:
        return None
    size = match[1]
    classifier.check_size(name, "DeepViT", size, SIZES)
    return dict(patch=16, heads=12, mlp_dim=3 * SIZES[size]["width"]) | SIZES[size]


class DeepViTBlock(nnx.Module):
    """x + attention(norm(a x)) / a, then x + mlp(norm(a x)) / a (dvit_repo: `scale_adjustment`)."""

    def __init__(self, config: DeepViTConfig, reattention: bool, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        if reattention:
            self.attention = ReAttention(config, dtype=dtype, rngs=rngs)
        else:
            common = dict(implementation=config.attention, dtype=dtype, rngs=rngs)
            self.attention = Attention(config.width, config.heads, **common)
        self.mlp_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            config.width, config.mlp_dim, activation="gelu", dropout=0.0, dtype=dtype, rngs=rngs
        )
        self.reattention, self.scale = reattention, config.residual_scale

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """Adds attention, then the MLP: (B, N, D) to the same. Captured is `attention` (B, H, N, N), by which the
        values were multiplied.
        """
        keys = split(key, 2)
        options = {"training": training} if self.reattention else {}
        y, maps = self.attention(self.attention_norm(x * self.scale), **options)
        x = x + drop_path(y / self.scale, drop_path_rate, keys[0])
        y = self.mlp(self.mlp_norm(x * self.scale))
        return x + drop_path(y / self.scale, drop_path_rate, keys[1]), {"attention": maps}


class DeepViTStage(nnx.Module):
    """Equal blocks, one after the other."""

    def __init__(self, config: DeepViTConfig, count: int, reattention: bool, *, dtype, rngs):
        make = lambda rngs: DeepViTBlock(config, reattention, dtype=dtype, rngs=rngs)  # noqa: E731
        self.layers = stack.stack(make, count, rngs)


class DeepViT(stacked.StackedModel):
    """Images to logits, by stages of equal blocks."""

    def make_embedding(self, config: DeepViTConfig, *, dtype, rngs: nnx.Rngs) -> nnx.Module:
        if not config.conv_stem:
            return super().make_embedding(config, dtype=dtype, rngs=rngs)
        sizes = config.patch, config.channels, config.width
        return ConvolutionalEmbedding(*sizes, dtype=dtype, rngs=rngs)

    def make_layers(self, config: DeepViTConfig, *, dtype, rngs: nnx.Rngs) -> None:
        self.stages = nnx.Dict(
            {
                name: DeepViTStage(config, count, reattention, dtype=dtype, rngs=rngs)
                for name, (count, reattention) in config.named_stages.items()
            }
        )

    def embed(self, images: jax.Array, training: bool) -> jax.Array:
        options = {"training": training} if self.config.conv_stem else {}
        return self.embedding(images, **options)

    def run_blocks(
        self, x: jax.Array, depths: tuple, step: Callable
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        config, captured, first = self.config, [], 0
        if config.weighted_layers:
            x, step = pooling.with_sum(x), pooling.weighted(step)
            depths = (self.layer_weights(), *depths)
        for name, (count, _) in config.named_stages.items():
            mine = [None if a is None else a[first : first + count] for a in depths]
            loop = dict(remat=choices.remat(config), unroll=config.unroll)
            x, arrays = stack.scan(step, self.stages[name].layers, x, tuple(mine), **loop)
            captured.append(arrays)
            first += count
        x = x[1] if config.weighted_layers else x
        return x, {name: jnp.concatenate([c[name] for c in captured]) for name in captured[0]}


Config, Model = DeepViTConfig, DeepViT  # for the registry


class ConvolutionalEmbedding(PatchEmbedding):
    """Patches of a map of features at half the resolution: beside their `kernel` and `bias` stands
    the `stem` that makes it.
    """

    def __init__(self, patch: int, channels: int, width: int, *, dtype, rngs: nnx.Rngs):
        super().__init__(patch // 2, STEM_CHANNELS, width, dtype=dtype, rngs=rngs)
        self.stem = Stem(channels, dtype=dtype, rngs=rngs)

    def __call__(self, images: jax.Array, *, training: bool) -> jax.Array:
        """images (B, H, W, C) -> tokens (B, N, D), row by row."""
        return super().__call__(self.stem(images, training=training))


class Stem(nnx.Module):
    """Convolution, batch norm and ReLU, twice: 7x7 of stride 2, then 3x3."""

    def __init__(self, channels: int, *, dtype, rngs: nnx.Rngs):
        def convolution(inputs, size, stride):
            return nnx.Conv(
                inputs,
                STEM_CHANNELS,
                (size, size),
                strides=stride,
                padding=size // 2,
                use_bias=False,
                dtype=dtype,
                rngs=rngs,
            )

        self.conv1, self.norm1 = convolution(channels, 7, 2), BatchNorm(STEM_CHANNELS)
        self.conv2, self.norm2 = convolution(STEM_CHANNELS, 3, 1), BatchNorm(STEM_CHANNELS)

    def __call__(self, images: jax.Array, *, training: bool) -> jax.Array:
        """images (B, H, W, C) -> (B, H/2, W/2, 64)."""
        x = nnx.relu(self.norm1(self.conv1(images), training=training))
        return nnx.relu(self.norm2(self.conv2(x), training=training))
