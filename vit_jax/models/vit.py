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

    # Rows of the position table that belong to no patch.
    prefix = property(lambda self: self.placed_tokens * positions.of(self).has_prefix)
    has_class_token = property(lambda self: self.pool == "token")
    placed_tokens = property(lambda self: self.has_class_token + self.distilled)
    patches = property(lambda self: self.grid[0] * self.grid[1])
    tokens = property(lambda self: self.placed_tokens + self.registers + self.patches)
    two_heads = property(lambda self: self.distilled)
    pooled_width = property(lambda self: self.width)
    pool_heads = property(lambda self: self.heads)
    pool_mlp_dim = property(lambda self: self.mlp_dim)
    fixed_size_reason = property(lambda self: "")

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
        dtype, width, normal = jnp.dtype(config.dtype), config.width, nnx.initializers.normal
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
        if (hidden := config.representation) > 0:
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
        """Classifies images (B, H, W, C), or a `PatchBatch`. What is captured has registers, `tokens` have none."""
        classifier.check_images(images, self.config)
        call = dict(deterministic=deterministic, rngs=rngs)
        sized = {"native": images} if isinstance(images, PatchBatch) else {}  # few families take it
        x = self.place(self.patches(images, **call), **sized)
        return self.read(*self.encode(x, **call, **sized, capture=capture), **sized)

    def patches(self, images, *, deterministic=True, rngs=None) -> jax.Array:
        """Images (B, H, W, C), or a `PatchBatch` -> patches (B, N, D), row by row, without positions."""
        return self.embedding(images)

    def place(
        self,
        patches: jax.Array,
        visible: jax.Array | None = None,
        native: PatchBatch | None = None,
    ) -> jax.Array:
        """Patches (B, N, D), or `visible` (B, V) ones, with positions and after the learned tokens. In all steps
        `native` are the images where they have sizes of their own.
        """
        x, prefix, table = patches, self.config.prefix, self.positions(patches.dtype)
        if table is not None:
            table, rows = table[:, prefix:], table[:, :prefix]
            if native is None:
                x = x + per_example(table, x.shape[0])
            else:
                x = x + positions.of(self.config).at(self.position, table, native)
        if visible is not None:
            x = jnp.take_along_axis(x, visible[..., None], axis=1)
        names = ("class_token", "distillation_token", "registers")
        tokens = [getattr(self, name)[...].astype(x.dtype) for name in names if hasattr(self, name)]
        if table is not None and prefix:
            ends = np.cumsum([token.shape[1] for token in tokens])
            rows = jnp.split(rows, ends[ends < prefix], 1)
            tokens[: len(rows)] = [t + row for t, row in zip(tokens, rows, strict=False)]
        return prepend(tokens, x)

    def positions(self, dtype: jnp.dtype) -> jax.Array | None:
        """What `place` adds, (1, prefix + N, D)."""
        return positions.of(self.config).table(self.position, dtype, self.places)

    def encode(
        self, x, *, deterministic=True, rngs=None, capture=False, joining=None, native=None
    ) -> tuple[jax.Array, dict]:
        """Of what `place` gives, the tokens after the last norm, without registers; and what was captured.
        With tokens that join, a `stack.Joining`, all tokens, these first; and nothing is captured.
        """
        config, placed = self.config, self.config.placed_tokens
        rates = config.dropout, config.attention_dropout, config.drop_path
        first_key, key = split(draw_key(rngs, deterministic, *rates), 2)
        sized = {} if native is None else {"lengths": native.lengths(x.shape[1])}
        x = dropout(x, config.dropout, first_key)
        x, captured = self.encoder(x, key, capture, joining, **sized)
        if config.registers and joining is None:
            x = jnp.concatenate([x[:, :placed], x[:, placed + config.registers :]], axis=1)
        return x, captured

    def last_norm(self, x: jax.Array, layer: str) -> jax.Array:
        return x if self.encoder.norm is None else self.encoder.norm(x)

    def read(
        self, tokens: jax.Array, captured: dict[str, jax.Array], native: PatchBatch | None = None
    ) -> ModelOutput:
        """The output for what `encode` gives; two heads read a token each, `logits` and `features` are the means."""
        features = pooling.pooled(self.pool, tokens, native)
        if self.config.representation:
            features = jnp.tanh(self.representation(features))
        if not (self.config.two_heads and self.config.num_classes):
            return ModelOutput(self.classify(features), features, tokens, captured)
        heads = enumerate((self.head, self.head_distilled))
        exits = jnp.stack([head(tokens[:, i].astype(jnp.float32)) for i, head in heads])
        return ModelOutput(exits.mean(axis=0), features, tokens, captured, exits)


class Encoder(nnx.Module):
    """Blocks, their parameters stacked along a leading axis, and a norm."""

    def __init__(self, config: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs):
        make = lambda rngs: Block(config, dtype=dtype, rngs=rngs)  # noqa: E731
        self.config, self.layers = config, stack.stack(make, config.depth, rngs)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)

    def __call__(
        self, x, key=None, capture=False, joining=None, lengths=None
    ) -> tuple[jax.Array, dict]:
        """(B, N, D) -> the same; and with `capture` of each block its `attention` weights and output, `blocks`. Of
        each image `lengths` (B,) tokens count, or all.
        """
        sized = {} if lengths is None else {"lengths": lengths}  # which few blocks take

        def step(block, x, rate, key, bias=None):
            x, weights = block(x, rate, key, bias, **sized)
            return x, contract.captured(capture, attention=weights, blocks=x)

        loop = dict(remat=choices.remat(self.config), unroll=self.config.unroll, joining=joining)
        depths = by_depth(self.config.drop_path, self.config.depth, key)
        x, captured = stack.scan(step, self.layers, x, depths, **loop)
        return self.norm(x), captured


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3)."""

    def __init__(self, config: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs):
        width, common = config.width, dict(dropout=config.dropout, dtype=dtype, rngs=rngs)
        own = dict(attention_dropout=config.attention_dropout, implementation=config.attention)
        self.attention_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.attention = Attention(width, config.heads, **own, **common)
        self.mlp_norm = layer_norm(width, config.epsilon, dtype, rngs)
        self.mlp = Mlp(width, config.mlp_dim, activation=config.activation, **common)

    def __call__(
        self, x, drop_path_rate, key, bias=None, lengths=None
    ) -> tuple[jax.Array, jax.Array]:
        """(B, N, D) -> the same, and the attention weights (B, H, N, N); `bias` and `lengths` as in `Attention`."""
        keys, sized = split(key, 4), {} if lengths is None else {"lengths": lengths}
        y, weights = self.attention(self.attention_norm(x), key=keys[0], bias=bias, **sized)
        x = x + drop_path(y, drop_path_rate, keys[1])
        y = self.mlp(self.mlp_norm(x), key=keys[2])
        return x + drop_path(y, drop_path_rate, keys[3]), weights
