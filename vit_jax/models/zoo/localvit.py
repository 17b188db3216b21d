"""LocalViT (arXiv 2104.05707): a ViT whose MLPs are convolutional, a depth-wise one between two of 1x1, so
that neighbours exchange what they hold; the class token goes round them.

Sources: the paper and the authors' code (ofsoundof/LocalViT; its class `Block`, of the released DeiT variant). Where
these differ, the code decides. There is no norm and no stochastic depth before or on the convolutional path. There are
4 and 8 heads where DeiT has 3 and 6. LocalViT-T has 5,908,696 parameters, where the README says 5.7 M.

Ours: linear layers begin Xavier-uniform as in the other families, in that code normal with std 0.02.
"""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import convolution, partitioning, recompute
from vit_jax.compute.dense import dense
from vit_jax.compute.dropout import drop_path
from vit_jax.models import batch_norm, classifier, stacked
from vit_jax.models.attention import Attention, attention_flops, implementation_option
from vit_jax.models.batch_norm import BatchNorm
from vit_jax.models.layers import Kernel, SqueezeExcite, layer_norm, mlp_flops

# The authors' code; all have patches of 16 pixels, 12 blocks, and MLPs four times as wide as a token.
SIZES = {
    "T": dict(width=192, heads=4, reduction=192),
    "T-SE4": dict(width=192, heads=4, reduction=4),
    "S": dict(width=384, heads=8, reduction=384),
}
VARIANTS = [f"LocalViT-{size}" for size in SIZES]
ACCURACY = dict(zip(VARIANTS, (74.8, 75.7, 80.8), strict=True))
SMOKE = ("localvit.py:smoke", 98.9, 171)
ACTIVATIONS = {"relu6": jax.nn.relu6, "hard_swish": jax.nn.hard_swish}
GATES = {"none": None, "se": None, "eca": jax.nn.sigmoid, "eca_hard": jax.nn.hard_sigmoid}


@dataclasses.dataclass(frozen=True)
class LocalViTConfig(stacked.StackedConfig, batch_norm.BatchNormConfig):
    """A LocalViT."""

    # Of the convolutions inside of the MLPs; `meshes.TENSOR_RULES` has the rest.
    tensor_rules = (
        (r".*mlp/(up_norm|depthwise_norm)/(scale|bias|mean|var)", -1),
        (r".*mlp/depthwise/kernel", -1),
    )

    width: int = option(192, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(768, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(4, "attention heads", minimum=1, role="size")
    activation: str = option("hard_swish", "of the MLPs", choices=ACTIVATIONS, role="convention")
    gate: str = option(
        "se",
        "of an MLP's channels, by their means over the image: squeeze-excite, efficient channel "
        "attention with a sigmoid or a hard one",
        choices=GATES,
        role="structure",
    )
    reduction: int = option(
        192, "gate=se: hidden channels over those between", minimum=1, role="size"
    )
    pool: str = option(
        "token",
        "how tokens become one vector; token: the class token (the other kinds have none); gem: generalised "
        "mean, its power learned",
        choices=("token", "mean", "gem"),
        role="structure",
    )
    drop_path: float = option(
        0.0,
        "stochastic depth of the last block's attention, growing linearly from 0",
        minimum=0,
        below=1,
    )
    attention: str = implementation_option()

    def __post_init__(self):
        classifier.check_heads(self)
        super().__post_init__()
        if self.gate == "se" and self.reduction > self.mlp_dim:
            raise ConfigError(
                f"model.reduction = {self.reduction} leaves none of the {self.mlp_dim} channels of an MLP: "
                "choose at most as many"
            )

    def block_flops(self) -> int:
        """Operations of one block; the class token has no MLP."""
        d, m = self.width, self.mlp_dim
        patches = self.grid[0] * self.grid[1]
        gate = {"se": 4 * m * (m // self.reduction), "none": 0}.get(self.gate, 2 * m * eca_size(m))
        return attention_flops(self.tokens, d) + mlp_flops(patches, d, m) + patches * 18 * m + gate


def options_from_name(name: str) -> dict | None:
    """`LocalViT-S` -> its size; `None` for a name of another family."""
    match = re.fullmatch(r"LocalViT-(.+)", name)
    if not match:
        return None
    size = match[1]
    classifier.check_size(name, "LocalViT", size, SIZES)
    return dict(patch=16, depth=12, mlp_dim=4 * SIZES[size]["width"]) | SIZES[size]


class LocalViTBlock(nnx.Module):
    """x + attention(norm(x)), of which the patches then go through the convolutional MLP."""

    def __init__(self, config: LocalViTConfig, *, dtype, rngs: nnx.Rngs):
        self.attention_norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.attention = Attention(
            config.width, config.heads, implementation=config.attention, dtype=dtype, rngs=rngs
        )
        self.mlp = ConvolutionalMlp(config, dtype=dtype, rngs=rngs)
        self.grid, self.prefix = config.grid, config.prefix

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """Adds attention, then the MLP of the patches: (B, N, D) to the same; captured is `attention` (B, H, N, N)."""
        y, weights = self.attention(self.attention_norm(x))
        x = x + drop_path(y, drop_path_rate, key)
        of_class, patches = x[:, : self.prefix], x[:, self.prefix :]
        y = self.mlp(patches.reshape(x.shape[0], *self.grid, -1), training=training)
        x = jnp.concatenate([of_class, patches + y.reshape(patches.shape)], axis=1)
        return x, {"attention": weights}


class LocalViT(stacked.StackedModel):
    """Images to logits."""

    Block = LocalViTBlock


class ConvolutionalMlp(nnx.Module):
    """1x1 convolution, 3x3 depth-wise convolution, a gate of channels, 1x1 convolution; a batch norm after
    each convolution, an activation after the first two (LocalViT Eq. 5; authors' code).

    Parameters: `up/kernel` (D, M), `depthwise/kernel` (3, 3, 1, M), `down/kernel` (M, D).
    """

    def __init__(self, config: LocalViTConfig, *, dtype, rngs: nnx.Rngs):
        width, hidden = config.width, config.mlp_dim
        xavier = nnx.initializers.xavier_uniform()
        self.up = Kernel(xavier, (width, hidden), rngs)
        self.up_norm = BatchNorm(hidden)
        draw = nnx.initializers.variance_scaling(2.0, "fan_in", "normal", (0, 1, 2), 3)
        self.depthwise = Kernel(draw, (3, 3, 1, hidden), rngs)
        self.depthwise_norm = BatchNorm(hidden)
        self.gate = gate(config, dtype=dtype, rngs=rngs)
        self.down = Kernel(xavier, (hidden, width), rngs)
        self.down_norm = BatchNorm(width)
        self.activation = config.activation

    def __call__(self, x: jax.Array, *, training: bool) -> jax.Array:
        """Feature maps (B, H, W, D) -> the same."""
        activate = ACTIVATIONS[self.activation]
        y = recompute.keep(dense(x, self.up.kernel[...], None), recompute.HIDDEN)
        y = activate(self.up_norm(y, training=training))
        y = convolution.depthwise(y, partitioning.gather_kernel(self.depthwise.kernel[...]))
        y = activate(self.depthwise_norm(y, training=training))
        y = y if self.gate is None else self.gate(y)
        return self.down_norm(dense(y, self.down.kernel[...], None), training=training)


Config, Model = LocalViTConfig, LocalViT  # for the registry


def gate(config: LocalViTConfig, *, dtype, rngs: nnx.Rngs) -> nnx.Module | None:
    """What gates the channels of an MLP's feature maps (B, H, W, M), if anything does."""
    if config.gate == "none":
        return None
    if config.gate == "se":
        hidden = config.mlp_dim // config.reduction
        return SqueezeExcite(
            config.mlp_dim,
            hidden,
            nnx.relu,
            jax.nn.hard_sigmoid,
            kernel_init=nnx.initializers.lecun_normal(),
            dtype=dtype,
            rngs=rngs,
        )
    return ChannelAttention(config.mlp_dim, GATES[config.gate], rngs=rngs)


class ChannelAttention(nnx.Module):
    """Each channel times a gate in [0, 1]: a convolution along the channels' means over the image
    (ECA-Net, arXiv 1910.03151), `kernel` (K,) without bias.
    """

    def __init__(self, channels: int, sigmoid: Callable, *, rngs: nnx.Rngs):
        size = eca_size(channels)
        limit = size**-0.5
        self.kernel = nnx.Param(
            jax.random.uniform(rngs.params(), (size,), minval=-limit, maxval=limit)
        )
        self.sigmoid = sigmoid

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, H, W, C) -> the same."""
        kernel, means = self.kernel[...].astype(x.dtype), x.mean((1, 2))
        size, channels = kernel.shape[0], means.shape[1]
        padded = jnp.pad(means, ((0, 0), (size // 2, size // 2)))
        gate = sum(kernel[i] * padded[:, i : i + channels] for i in range(size))
        return x * self.sigmoid(gate)[:, None, None]


def eca_size(channels: int) -> int:
    """The size of the convolution along so many channels: odd, about half of their log2 (ECA-Net
    Eq. 12, γ 2, b 1).
    """
    size = int(abs(np.log2(channels) + 1) / 2)
    return size if size % 2 else size + 1
