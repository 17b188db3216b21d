"""Vision Transformer (arXiv 2010.11929): the paper, read from top to bottom.

What only published weights need, and every name and size, is in `vit_zoo`, which extends these classes.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import choices, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import by_depth, draw_key, drop_path, dropout, split
from vit_jax.compute.learned import per_example
from vit_jax.models import classifier, contract, pooling, positions
from vit_jax.models.attention import Attention, implementation_option
from vit_jax.models.contract import ModelOutput, PatchBatch
from vit_jax.models.embeddings import PatchEmbedding, prepend
from vit_jax.models.layers import Mlp, layer_norm

_SIZE = dict(minimum=1, role="size")
_RATE = dict(minimum=0, below=1)


@dataclasses.dataclass(frozen=True)
class VisionTransformerConfig(classifier.Patches, classifier.ClassifierConfig):
    """A ViT."""

    patch: int = classifier.patch_option()
    depth: int = option(12, "number of blocks", **_SIZE)
    width: int = option(768, "size of a token", **_SIZE)
    mlp_dim: int = option(3072, "hidden size of the MLPs", **_SIZE)
    heads: int = option(12, "attention heads", **_SIZE)
    pool: str = option(
        "token", "how tokens become one vector", choices=("token", "mean", "map"), role="structure"
    )
    position: str = option(
        "learned", "positions", choices=("learned", "sincos2d", "none"), role="structure"
    )
    registers: int = option(0, "learned tokens without a position", minimum=0, role="structure")
    distilled: bool = option(False, "a token whose head learns from a teacher", role="structure")
    representation: int = option(
        0, "size of a tanh layer before the head; 0: none", minimum=0, role="structure", fitted=True
    )
    dropout: float = option(0.0, "after positions, attention and MLP layers (ViT B.1)", **_RATE)
    attention_dropout: float = option(0.0, "on the attention weights", **_RATE)
    drop_path: float = option(
        0.0, "stochastic depth of the last block, growing linearly from 0", **_RATE
    )
    attention: str = implementation_option()
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS, role="convention")
    epsilon: float = option(1e-6, "of the norms", role="convention")

    @property
    def prefix(self) -> int:
        """Rows of the position table that belong to no patch."""
        return self.tokens_with_position * positions.of(self).has_prefix

    @property
    def has_class_token(self) -> bool:
        """Whether a class token stands before the patches."""
        return self.pool == "token"

    @property
    def tokens_with_position(self) -> int:
        """Learned tokens that may have a position: class and distillation token."""
        return self.has_class_token + self.distilled

    @property
    def patches(self) -> int:
        """Patches of an image."""
        return self.grid[0] * self.grid[1]

    @property
    def tokens(self) -> int:
        """Tokens in the encoder."""
        return self.tokens_with_position + self.registers + self.patches

    @property
    def two_heads(self) -> bool:
        """Whether the distillation token has a head too."""
        return self.distilled

    @property
    def pooled_width(self) -> int:
        """Size of the one vector that the tokens become."""
        return self.width

    @property
    def pool_heads(self) -> int:
        """Heads of attention pooling."""
        return self.heads

    @property
    def pool_mlp_dim(self) -> int:
        """Hidden size of attention pooling's MLP."""
        return self.mlp_dim

    @property
    def fixed_size_reason(self) -> str:
        return ""

    def __post_init__(self):
        _ = self.grid  # which the image size may not give
        classifier.check_heads(self)
        if self.distilled and (self.pool != "token" or (self.representation and self.two_heads)):
            raise ConfigError("model.distilled needs model.pool=token and model.representation=0")


class VisionTransformer(classifier.Classifier):
    """Images to logits (ViT Eq. 1 to 4), in four steps: `patches`, `place`, `encode`, `read`.

    Attributes:
      places: grid whose fixed sines are spread over the patches, in steps of other sizes; `None`: their own.
    """

    places: tuple[int, int] | None = None

    def __init__(self, config: VisionTransformerConfig, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        width = config.width
        normal = nnx.initializers.normal
        self.config = config
        self.embedding = self.make_embedding(config, rngs)
        if config.has_class_token:
            self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        if config.distilled:
            # Not zero like the class token: without positions the two could not be distinguished.
            self.distillation_token = nnx.Param(normal(0.02)(rngs.params(), (1, 1, width)))
        self.position = self.make_position(config, rngs)
        if config.registers:
            self.registers = nnx.Param(normal(1e-6)(rngs.params(), (1, config.registers, width)))
        self.encoder = self.make_encoder(config, rngs)
        self.pool = self.make_pool(config, rngs)
        hidden = config.representation
        if hidden:
            self.representation = nnx.Linear(config.pooled_width, hidden, dtype=dtype, rngs=rngs)
        if config.num_classes:
            self.head = classifier.head(hidden or config.pooled_width, config, rngs)
            if config.two_heads:
                self.head_distilled = classifier.head(width, config, rngs)

    def make_embedding(self, config, rngs: nnx.Rngs) -> nnx.Module:
        """From images (B, H, W, C) to patches (B, N, D)."""
        dtype = jnp.dtype(config.dtype)
        return PatchEmbedding(config.patch, config.channels, config.width, dtype=dtype, rngs=rngs)

    def make_position(self, config, rngs: nnx.Rngs) -> positions.Variables:
        """The learned positions, if there are such."""
        return positions.of(config).variables(rngs)

    def make_encoder(self, config, rngs: nnx.Rngs) -> nnx.Module:
        """From tokens (B, …, D) to tokens."""
        return Encoder(config, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def make_pool(self, config, rngs: nnx.Rngs):
        """From tokens (B, …, D) to (B, D)."""
        return pooling.make_pooling(config, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def __call__(self, images, *, deterministic=True, rngs=None, capture=False) -> ModelOutput:
        """Classifies images (B, H, W, C), or a `PatchBatch`. Captured arrays have registers, `tokens` have none."""
        classifier.check_images(images, self.config)
        native = images if isinstance(images, PatchBatch) else None
        patches = self.patches(images, deterministic=deterministic, rngs=rngs)
        x = self.add_positions(patches, native=native)
        tokens, captured = self.encode(
            x, deterministic=deterministic, rngs=rngs, capture=capture, native=native
        )
        return self.forward_head(tokens, captured, native)

    def patches(self, images, *, deterministic=True, rngs=None) -> jax.Array:
        """Images (B, H, W, C), or a `PatchBatch` -> patches (B, N, D), row by row, without positions."""
        return self.embedding(images)

    def add_positions(
        self,
        patches: jax.Array,
        visible: jax.Array | None = None,
        native: PatchBatch | None = None,
    ) -> jax.Array:
        """z₀ (Eq. 1): patches with their positions, after the learned tokens with theirs.

        Args:
          patches: (B, N, D).
          visible: (B, V), the numbers of the patches that are seen; `None`: all.
          native: the images, if they have sizes of their own; in the later steps too.
        """
        table = self.positions(patches.dtype)
        if table is None:
            rows = None
            x = patches
        else:
            prefix = self.config.prefix
            of_patches = table[:, prefix:]
            rows = table[:, :prefix]
            x = patches + self.positions_of_patches(of_patches, patches.shape[0], native)
        if visible is not None:
            x = jnp.take_along_axis(x, visible[..., None], axis=1)
        return prepend(self.learned_tokens(rows, x.dtype), x)

    def positions_of_patches(
        self, table: jax.Array, batch_size: int, native: PatchBatch | None
    ) -> jax.Array:
        """The positions (B, N, D) of all patches, of the table (1, N, D) of the model's own grid."""
        if native is None:
            return per_example(table, batch_size)
        return positions.of(self.config).at(self.position, table, native)

    def learned_tokens(self, rows: jax.Array | None, dtype: jnp.dtype) -> list[jax.Array]:
        """Class token, distillation token and registers, (1, n, D) each, the first ones with their positions."""
        names = ("class_token", "distillation_token", "registers")
        tokens = [getattr(self, name)[...].astype(dtype) for name in names if hasattr(self, name)]
        if rows is None or not rows.shape[1]:
            return tokens
        ends = np.cumsum([token.shape[1] for token in tokens])
        inner_ends = ends[ends < rows.shape[1]]
        placed = jnp.split(rows, inner_ends, 1)
        tokens_with_position = [token + row for token, row in zip(tokens, placed, strict=False)]
        return [*tokens_with_position, *tokens[len(placed) :]]

    def positions(self, dtype: jnp.dtype) -> jax.Array | None:
        """The table that `place` adds, (1, prefix + N, D)."""
        return positions.of(self.config).table(self.position, dtype, self.places)

    def encode(
        self, x, *, deterministic=True, rngs=None, capture=False, joining=None, native=None
    ) -> tuple[jax.Array, dict]:
        """The encoder (Eq. 2 and 3): tokens after the last norm, without registers; and the captured arrays.

        Args:
          x: (B, T, D), from `place`.
          joining: tokens that join before the last blocks; then all tokens are returned, these first, and nothing is
            captured.
        """
        config = self.config
        rates = (config.dropout, config.attention_dropout, config.drop_path)
        first_key, key = split(draw_key(rngs, deterministic, *rates), 2)
        lengths = None if native is None else native.lengths(x.shape[1])
        x = dropout(x, config.dropout, first_key)
        x, captured = self.encoder(x, key, capture, joining, lengths)
        if config.registers and joining is None:
            placed = config.tokens_with_position
            x = jnp.concatenate([x[:, :placed], x[:, placed + config.registers :]], axis=1)
        return x, captured

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        return x if self.encoder.norm is None else self.encoder.norm(x)

    def forward_head(
        self, tokens: jax.Array, captured: dict[str, jax.Array], native: PatchBatch | None = None
    ) -> ModelOutput:
        """The output (Eq. 4) for the results of `encode`. Two heads read a token each; `logits` are their mean."""
        features = pooling.pooled(self.pool, tokens, native)
        if self.config.representation:
            features = jnp.tanh(self.representation(features))
        if not (self.config.two_heads and self.config.num_classes):
            return ModelOutput(self.classify(features), features, tokens, captured)
        of_class = self.head(tokens[:, 0].astype(jnp.float32))
        distilled = self.head_distilled(tokens[:, 1].astype(jnp.float32))
        exits = jnp.stack([of_class, distilled])
        return ModelOutput(exits.mean(axis=0), features, tokens, captured, exits)


class Encoder(nnx.Module):
    """Blocks, their parameters stacked along a leading axis, and a norm."""

    def __init__(self, config: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs):
        self.config = config
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)

    def __call__(
        self, x, key=None, capture=False, joining=None, lengths=None
    ) -> tuple[jax.Array, dict]:
        """Tokens (B, T, D) through all blocks and the norm; and the captured arrays, of each block its `attention`
        weights and its output, `blocks`.

        Args:
          joining: see `VisionTransformer.encode`.
          lengths: (B,), how many tokens of each image count; `None`: all.
        """
        config = self.config

        def step(block, x, rate, key, bias=None):
            x, weights = block(x, rate, key, bias, lengths)
            return x, contract.captured(capture, attention=weights, blocks=x)

        x, captured = stack.scan(
            step,
            self.layers,
            x,
            by_depth(config.drop_path, config.depth, key),
            remat=choices.remat(config),
            unroll=config.unroll,
            joining=joining,
        )
        return self.norm(x), captured


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3)."""

    def __init__(self, config: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs):
        width = config.width
        self.attention_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.attention = Attention(
            width,
            config.heads,
            attention_dropout=config.attention_dropout,
            implementation=config.attention,
            dropout=config.dropout,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(
            width,
            config.mlp_dim,
            activation=config.activation,
            dropout=config.dropout,
            dtype=dtype,
            rngs=rngs,
        )

    def __call__(
        self, x, drop_path_rate, key, bias=None, lengths=None
    ) -> tuple[jax.Array, jax.Array]:
        """(B, N, D) -> the same, and the attention weights (B, H, N, N); `bias` and `lengths` as in `Attention`."""
        keys = split(key, 4)
        y, weights = self.attention(self.attention_norm(x), key=keys[0], bias=bias, lengths=lengths)
        x = x + drop_path(y, drop_path_rate, keys[1])
        y = self.mlp(self.mlp_norm(x), key=keys[2])
        return x + drop_path(y, drop_path_rate, keys[3]), weights
