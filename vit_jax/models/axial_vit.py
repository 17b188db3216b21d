"""Axial-ViT (ViT §D.6): each block of a ViT becomes attention within the rows of the grid of patches and an
MLP, then attention within its columns and a second MLP.

Source: the paper's sentences; no code was released. What they leave open is decided here: no class token, which
has no row or column, so that the mean of the patches is classified (`pool`); all else is the ViT's.
"""

import dataclasses
import functools
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import attend, choices, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import by_depth, draw, drop_path, dropout, split
from vit_jax.models import classifier, pooling, vit
from vit_jax.models.attention import Attention
from vit_jax.models.contract import Capture, ModelOutput, kept
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.models.layers import Mlp, layer_norm

# Of the paper; any other size of a ViT and any patch work as well.
VARIANTS = ["Axial-ViT-B/16", "Axial-ViT-B/32"]
ACCURACY = {}  # none was published
SMOKE = ("axial.py:smoke", 99.2, 116)


@dataclasses.dataclass(frozen=True)
class Config(pooling.PatchOptions, classifier.Patches, classifier.Options):
    """An Axial-ViT."""

    epsilon: ClassVar[float] = 1e-6  # of the layer norms

    depth: int = option(12, "number of blocks", minimum=1, role="size")
    width: int = option(768, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(3072, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(12, "attention heads", minimum=1, role="size")
    dropout: float = option(
        0.0, "after the position embedding, attention and MLP layers (ViT B.1)", minimum=0, below=1
    )
    drop_path: float = option(
        0.0, "stochastic depth of the last block, growing linearly from 0", minimum=0, below=1
    )
    attention: str = option(
        "auto",
        "how attention is computed; all give the same. cudnn: GPU, 16 bits; splash: TPU",
        choices=attend.IMPLEMENTATIONS,
        role="compute",
    )
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS, role="convention")

    def __post_init__(self):
        classifier.patch_grid(self)
        classifier.check_heads(self)

    @property
    def tokens(self) -> int:
        """Patches."""
        return self.grid[0] * self.grid[1]

    @property
    def prefix(self) -> int:
        """Rows of the position embedding that stand for no patch."""
        return 0

    @property
    def pool_heads(self) -> int:
        """See `pooling.Options`."""
        return self.heads

    @property
    def layers(self) -> dict[str, int]:
        """See `classifier.Options`."""
        return {"layers": self.depth}

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as 2."""
        n, d, m = self.tokens, self.width, self.mlp_dim
        block = 2 * (8 * n * d * d + 4 * n * d * m) + 4 * n * sum(self.grid) * d
        embedding = 2 * n * self.patch**2 * self.channels * d
        head = pooling.flops(self) + 2 * d * self.num_classes
        return embedding + self.depth * block + head


def options_from_name(name: str) -> dict | None:
    """`Axial-ViT-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"Axial-ViT-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    classifier.check_size(name, "ViT", size, vit.SIZES)
    depth, width, mlp_dim, heads = vit.SIZES[size]
    return dict(patch=int(patch), depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)


class Model(nnx.Module):
    """Images to logits; see `Config` for what varies. Parameters are float32 whatever the compute
    dtype.
    """

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        self.config = config
        self.embedding = PatchEmbedding(
            config.patch, config.channels, config.width, dtype=dtype, rngs=rngs
        )
        draw = nnx.initializers.normal(0.02)
        self.position = nnx.Param(draw(rngs.params(), (1, config.tokens, config.width)))
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        if config.weighted_layers:
            self.layer_weights = pooling.LayerWeights(config.depth)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.pool = pooling.make(config, dtype=dtype, rngs=rngs)
        if config.num_classes:
            self.head = classifier.head(config.width, config, rngs)

    def __call__(
        self,
        images: jax.Array,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: Capture = False,
    ) -> ModelOutput:
        """Classifies images.

        Args:
          images: (B, H, W, C) float, normalised; of the config's image size.
          deterministic: no dropout, no stochastic depth.
          rngs: randomness (the stream `dropout`) when not deterministic.
          capture: also return the weights of attention in rows, `row_attention` (L, B, rows, H,
            columns, columns), and in columns, `column_attention`; and every block's output, `blocks`
            (L, B, N, D).

        Returns:
          `tokens` are the patches, row by row.
        """
        config = self.config
        classifier.check_images(images, config)
        first_key, key = split(draw(rngs, deterministic, config.dropout, config.drop_path), 2)
        rates, keys = by_depth(config.drop_path, config.depth, key)

        def step(block, x, rate, key):
            x, rows, columns = block(x, rate, key)
            if not capture:
                return x, {}
            blocks = x.reshape(x.shape[0], config.tokens, -1)
            return x, kept(capture, row_attention=rows, column_attention=columns, blocks=blocks)

        x = self.embedding(images)
        x = dropout(x + self.position[...].astype(x.dtype), config.dropout, first_key)
        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        x, captured = scan(
            step,
            self.layers,
            x.reshape(x.shape[0], *config.grid, -1),
            (rates, keys),
            remat=choices.remat(config),
            unroll=config.unroll,
        )
        tokens = self.norm(x.reshape(x.shape[0], config.tokens, -1))
        features = self.pool(tokens)
        logits = self.head(features.astype(jnp.float32)) if config.num_classes else None
        return ModelOutput(logits, features, tokens, captured)


class Block(nnx.Module):
    """A `Half` in the rows, then one in the columns."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        self.row = Half(config, dtype=dtype, rngs=rngs)
        self.column = Half(config, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: jax.Array, drop_path_rate: jax.Array, key: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(B, rows, columns, D) -> the same; the attention weights in each row (B, rows, H, columns,
        columns); and in each column.
        """
        keys = split(key, 2)
        x, rows = self.row(x, drop_path_rate, keys[0])
        x, columns = self.column(x.swapaxes(1, 2), drop_path_rate, keys[1])
        return x.swapaxes(1, 2), rows, columns


class Half(nnx.Module):
    """x + attention(norm(x)) in each line of a grid, then x + mlp(norm(x))."""

    def __init__(self, config: Config, *, dtype, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.width, config.epsilon, dtype, rngs)
        self.attention_norm = norm()
        self.attention = Attention(
            config.width,
            config.heads,
            dropout=config.dropout,
            implementation=config.attention,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        self.mlp = Mlp(
            config.width,
            config.mlp_dim,
            activation=config.activation,
            dropout=config.dropout,
            dtype=dtype,
            rngs=rngs,
        )

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
