"""Axial-ViT (ViT §D.6): each block of a ViT becomes attention within the rows of the grid of patches and an
MLP, then attention within its columns and a second MLP.

Source: the paper's sentences; no code was released. What they leave open is decided here: no class token, which
has no row or column, so that the mean of the patches is classified (`pool`); all else is the ViT's.
"""

import dataclasses
import re

import jax
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import classifier, pooling, stacked
from vit_jax.models.attention import Attention, attention_flops, implementation_option
from vit_jax.models.layers import Mlp, layer_norm, mlp_flops
from vit_jax.models.zoo import vit_zoo

# Of the paper; any other size of a ViT and any patch work as well.
VARIANTS = ["Axial-ViT-B/16", "Axial-ViT-B/32"]
ACCURACY = {}  # none was published
SMOKE = ("axial.py:smoke", 99.2, 116)


@dataclasses.dataclass(frozen=True)
class AxialViTConfig(pooling.PatchOptions, stacked.StackedConfig, classifier.ClassifierConfig):
    """An Axial-ViT."""

    heads: int = option(12, "attention heads", minimum=1, role="size")
    dropout: float = option(
        0.0, "after positions, attention and MLP layers (ViT B.1)", minimum=0, below=1
    )
    attention: str = implementation_option()
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS, role="convention")

    def __post_init__(self):
        classifier.check_heads(self)
        super().__post_init__()

    @property
    def pool_heads(self) -> int:
        return self.heads

    def block_flops(self) -> int:
        n, d = self.tokens, self.width
        attention = sum(attention_flops(n, d, attended=length) for length in self.grid)
        return attention + 2 * mlp_flops(n, d, self.mlp_dim)


def options_from_name(name: str) -> dict | None:
    """`Axial-ViT-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"Axial-ViT-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    classifier.check_size(name, "ViT", size, vit_zoo.SIZES)
    depth, width, mlp_dim, heads = vit_zoo.SIZES[size]
    return dict(patch=int(patch), depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)


class AxialLayer(nnx.Module):
    """x + attention(norm(x)) in each line of a grid, then x + mlp(norm(x))."""

    def __init__(self, config: AxialViTConfig, *, dtype, rngs: nnx.Rngs):
        width, common = config.width, dict(dropout=config.dropout, dtype=dtype, rngs=rngs)
        self.attention_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.attention = Attention(width, config.heads, implementation=config.attention, **common)
        self.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(width, config.mlp_dim, activation=config.activation, **common)

    def __call__(
        self, x: jax.Array, drop_path_rate: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """(B, lines, N, D) -> the same, and the attention weights (B, lines, H, N, N)."""
        keys, (batch, lines, *_) = split(key, 4), x.shape
        y = self.attention_norm(x)
        y, weights = self.attention(y.reshape(-1, *y.shape[2:]), key=keys[0])
        x = x + drop_path(y.reshape(x.shape), drop_path_rate, keys[1])
        x = x + drop_path(self.mlp(self.mlp_norm(x), key=keys[2]), drop_path_rate, keys[3])
        return x, weights.reshape(batch, lines, *weights.shape[1:])


class AxialBlock(nnx.Module):
    """A layer in the rows, then one in the columns."""

    def __init__(self, config: AxialViTConfig, *, dtype, rngs: nnx.Rngs):
        self.row = AxialLayer(config, dtype=dtype, rngs=rngs)
        self.column = AxialLayer(config, dtype=dtype, rngs=rngs)

    def __call__(self, x, drop_path_rate, key, *, training: bool) -> tuple[jax.Array, dict]:
        """Attention along rows, then along columns, of x (B, rows, columns, D). Captured are `row_attention`
        (B, rows, H, columns, columns), and `column_attention`, the same for columns.
        """
        keys = split(key, 2)
        x, rows = self.row(x, drop_path_rate, keys[0])
        x, columns = self.column(x.swapaxes(1, 2), drop_path_rate, keys[1])
        return x.swapaxes(1, 2), {"row_attention": rows, "column_attention": columns}


class AxialViT(stacked.StackedModel):
    """Images to logits."""

    Block = AxialBlock

    def to_blocks(self, x: jax.Array) -> jax.Array:
        """Tokens (B, N, D) in their grid, (B, rows, columns, D)."""
        return x.reshape(x.shape[0], *self.config.grid, -1)

    def from_blocks(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0], self.config.tokens, -1)


Config, Model = AxialViTConfig, AxialViT  # for the registry
