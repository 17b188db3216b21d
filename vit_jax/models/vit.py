"""Vision Transformer (arXiv 2010.11929), from Ti to 22B, as the official code and big_vision define it."""

import dataclasses
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.compute import attend
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import draw, dropout, split
from vit_jax.models import classifier, embeddings, encoder, layers, pooling, positions, rotary
from vit_jax.models.contract import Capture, ModelOutput
from vit_jax.models.embeddings import PatchEmbedding, prepend

# depth, width, MLP width, heads. Ti, S: AugReg Table 1; B, L, H: ViT Table 1; g, G: Scaling ViT Table 2; the others
# big_vision. 22B: width, depth and heads from secondary listings, MLP width from the parameter count (unconfirmed).
SIZES = {
    "mu": (1, 32, 128, 2),
    "s": (6, 256, 1024, 8),
    "Ti": (12, 192, 768, 3),
    "S": (12, 384, 1536, 6),
    "M": (12, 512, 2048, 8),
    "B": (12, 768, 3072, 12),
    "L": (24, 1024, 4096, 16),
    "So400m": (27, 1152, 4304, 16),
    "H": (32, 1280, 5120, 16),
    "g": (40, 1408, 6144, 16),
    "g-opt": (40, 1536, 6144, 16),
    "G": (48, 1664, 8192, 16),
    "G-opt": (48, 1536, 8192, 16),
    "e": (56, 1792, 15360, 16),
    "22B": (48, 6144, 24576, 48),
}
DEIT_SIZES = ("Ti", "S", "B")
# ViT-22B §2: parallel blocks, normed queries and keys, no biases in the blocks' QKV projections and norms.
OPTIONS_22B = dict(parallel=True, qk_norm=True, qkv_bias=False, norm_bias=False, pool="map")
# Listed by `vit_jax models`; any other patch size works as well.
VARIANTS = [
    "ViT-mu/16", "ViT-s/28", "ViT-s/16", "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-M/16", "ViT-B/32", "ViT-B/16",
    "ViT-B/8", "ViT-L/32", "ViT-L/16", "ViT-So400m/14", "ViT-H/14", "ViT-g/14", "ViT-g-opt/16", "ViT-G/14",
    "ViT-G-opt/16", "ViT-e/14", "ViT-22B/14", "DeiT-Ti/16", "DeiT-S/16", "DeiT-B/16",
]  # fmt: skip
# AugReg Table 3, "i1k up"; DeiT Table 5.
ACCURACY = {
    "ViT-Ti/16": 72.6, "ViT-S/32": 72.1, "ViT-S/16": 79.0, "ViT-B/32": 74.4, "ViT-B/16": 79.8, "ViT-L/16": 75.7,
    "DeiT-Ti/16": 72.2, "DeiT-S/16": 79.9, "DeiT-B/16": 81.8,
}  # fmt: skip
SMOKE = ("digits.py", 99.2, 199)


@dataclasses.dataclass(frozen=True)
class Config(
    encoder.Options,
    rotary.Options,
    positions.Options,
    embeddings.Options,
    pooling.TokenOptions,
    classifier.Patches,
    classifier.Options,
):
    """A ViT."""

    depth: int = option(12, "number of blocks", minimum=1, role="size")
    width: int = option(768, "size of a token", minimum=1, role="size")
    mlp_dim: int = option(3072, "hidden size of the MLPs", minimum=1, role="size")
    heads: int = option(12, "attention heads", minimum=1, role="size")
    representation: int = option(
        0,
        "size of a tanh layer before the head, as a rule the width; 0: none",
        minimum=0,
        role="structure",
        fitted=True,
    )
    distilled: bool = option(
        False,
        "a second learned token with a head of its own, to learn from a teacher (DeiT)",
        role="structure",
    )
    distillation_head: bool = option(
        True, "distilled: the second token has its head; else no head reads it", role="convention"
    )
    registers: int = option(
        0,
        "learned tokens of no place, dropped after the encoder (2309.16588)",
        minimum=0,
        role="structure",
    )
    dropout: float = option(
        0.0, "after the position embedding, attention and MLP layers (ViT B.1)", minimum=0, below=1
    )
    attention_dropout: float = option(0.0, "on the attention weights", minimum=0, below=1)
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
    epsilon: float = option(1e-6, "of the norms", role="convention")

    def __post_init__(self):
        # JSON has no tuples.
        object.__setattr__(self, "rope_grid", tuple(self.rope_grid))
        # Where the class token is read, it is there anyway.
        object.__setattr__(
            self, "keep_class_token", self.keep_class_token and not self.reads_class_token
        )
        _ = self.grid  # which the image size may not give
        classifier.check_heads(self)
        encoder.check(self)
        rotary.check(self)
        positions.check(self)
        if self.distilled and (
            (self.pool, self.last_norm) != ("token", "tokens")
            or (self.representation and self.distillation_head)
        ):
            raise ConfigError(
                "model.distilled reads class and distillation token with a linear head each: "
                "it needs model.pool=token and model.representation=0, and model.last_norm=tokens"
            )
        if self.width % self.pool_heads:
            heads = f"model.map_heads={self.map_heads}"
            raise ConfigError(f"model width {self.width} cannot be cut into {heads}")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        if self.crop_to_patches:
            return tuple(side // self.patch for side in self.height_width)
        return super().grid

    @property
    def tokens(self) -> int:
        """Tokens in the encoder."""
        return self.placed_tokens + self.registers + self.grid[0] * self.grid[1]

    @property
    def placed_tokens(self) -> int:
        """Learned tokens that may have a position: the class token and the distillation token."""
        return self.has_class_token + self.distilled

    @property
    def two_heads(self) -> bool:
        """See `classifier.Options`: whether two tokens are read, with a head each."""
        return self.distilled and self.distillation_head

    @property
    def layers(self) -> dict[str, int]:
        """See `classifier.Options`."""
        return {"encoder/layers": self.depth}

    @property
    def inputs(self) -> tuple[str, ...]:
        """See `classifier.Options`; the frequencies of a mixed rotation, of all layers, lie before these."""
        return (*super().inputs, "patch_norm", "pre_norm", "rope")

    def starts_anew(self, target: "Config") -> tuple[str, ...]:
        """See `classifier.Options`."""
        same_layer = target.representation == self.representation
        same_head = same_layer and target.num_classes == self.num_classes
        has_head = target.num_classes or self.num_classes
        anew = () if same_head or not has_head else ("head(_distilled)?/.*",)
        return anew if same_layer else (*anew, "representation/.*")

    def fit(self, name: str, target: "Config", *, resize: str) -> tuple[str, Callable] | None:
        """See `classifier.Options`."""
        found = positions.fit(name, self, target, resize)
        return found or classifier.fit_patches(name, self, target)

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as 2, full attention."""
        heads = (1 + self.two_heads) * (self.representation or self.pooled_width) * self.num_classes
        head = 2 * self.pooled_width * self.representation + 2 * heads
        blocks = self.block_flops(self.tokens)
        return self.embedding_flops() + blocks + pooling.flops(self) + head

    def block_flops(self, n: int) -> int:
        """Those of `flops` of all blocks, for `n` tokens."""
        d, m = self.width, self.mlp_dim
        block = 8 * n * d * d + 4 * n * n * d + (6 if self.gated_mlp else 4) * n * d * m
        return self.depth * (block + 2 * n * n * d * self.biased_attention)

    def embedding_flops(self) -> int:
        """Those of `flops` that make tokens of an image."""
        rows, columns = self.grid
        return 2 * rows * columns * self.patch**2 * self.channels * self.width


def options_from_name(name: str) -> dict | None:
    """`ViT-B/16` -> its size and patch; `None` for a name of another family.

    A DeiT (arXiv 2012.12877) is a ViT with the exact GELU; with `distilled=True` it is the paper's distilled one.
    """
    match = re.fullmatch(r"(ViT|DeiT)-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    kind, size, patch = match.groups()
    sizes = SIZES if kind == "ViT" else DEIT_SIZES
    classifier.check_size(name, kind, size, sizes)
    depth, width, mlp_dim, heads = SIZES[size]
    options = dict(patch=int(patch), depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)
    if kind == "DeiT":
        options["activation"] = "gelu"
    return options | (OPTIONS_22B if size == "22B" else {})


class Model(nnx.Module):
    """Images to logits; see `Config` for what varies. Parameters are float32 whatever the compute dtype."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        width = config.width
        self.config = config
        self.embedding = self.make_embedding(config, rngs)
        if config.patch_norm:
            self.patch_norm = encoder.make_norm(config, dtype=dtype, rngs=rngs)(width)
        if config.has_class_token:
            self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        if config.distilled:
            # Not zero like the class token: without positions the two could not be told apart.
            self.distillation_token = nnx.Param(
                nnx.initializers.normal(0.02)(rngs.params(), (1, 1, width))
            )
        of_model = config.position_place in ("stem", "shared")
        self.position = positions.variables(config, rngs) if of_model else None
        if config.registers:
            draw = nnx.initializers.normal(1e-6)
            self.registers = nnx.Param(draw(rngs.params(), (1, config.registers, width)))
        self.rope = rotary.variables(config, rngs)
        if config.pre_norm:
            self.pre_norm = encoder.make_norm(config, dtype=dtype, rngs=rngs)(width)
        self.encoder = self.make_encoder(config, rngs)
        self.pool = pooling.make(config, dtype=dtype, rngs=rngs)
        if config.last_norm == "pooled":
            self.pool_norm = encoder.make_norm(config, dtype=dtype, rngs=rngs)(config.pooled_width)
        if config.representation:
            self.representation = nnx.Linear(
                config.pooled_width, config.representation, dtype=dtype, rngs=rngs
            )
        if config.num_classes:
            self.head = classifier.head(config.representation or config.pooled_width, config, rngs)
            if config.two_heads:
                self.head_distilled = classifier.head(width, config, rngs)
        if config.init == "deit":
            layers.draw_as_deit(self, rngs)

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
          rngs: their randomness (the stream `dropout`) when not deterministic.
          capture: also return attention weights and every block's output, or what a function makes of
            those of each block, see `contract.Capture`.

        Returns:
          `tokens` are the class and the distillation token, if there are any, then the patches;
          registers are dropped, but stand between these in what is captured, and where `pool_prefix` reads them. With
          two heads, `logits` and `features` are the means of the two tokens' and `exits` has the logits apart.
        """
        classifier.check_images(images, self.config)
        tokens, intermediates = self.encode(
            self.place(self.patches(images, deterministic=deterministic, rngs=rngs)),
            deterministic=deterministic,
            rngs=rngs,
            capture=capture,
        )
        return self.read(tokens, intermediates)

    def make_embedding(self, config: Config, rngs: nnx.Rngs) -> nnx.Module:
        """From images (B, H, W, C) to tokens (B, N, D); a family that embeds otherwise has its own."""
        dtype = jnp.dtype(config.dtype)
        return PatchEmbedding(
            config.patch,
            config.channels,
            config.width,
            bias=config.patch_bias,
            crop=config.crop_to_patches,
            dtype=dtype,
            rngs=rngs,
        )

    def make_encoder(self, config: Config, rngs: nnx.Rngs) -> nnx.Module:
        """From tokens to tokens; a family whose blocks are others has its own."""
        return encoder.Encoder(config, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def patches(
        self, images: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None
    ) -> jax.Array:
        """The patches of images (B, H, W, C) as tokens (B, N, D), row by row, without positions.

        Args:
          deterministic, rngs: as in every family; nothing is random in a linear layer.
        """
        x = self.embedding(images)
        return self.patch_norm(x) if self.config.patch_norm else x

    def place(self, patches: jax.Array, visible: jax.Array | None = None) -> jax.Array:
        """The encoder's input: patches with their positions, and the learned tokens.

        Args:
          patches: (B, N, D), from `patches`.
          visible: (B, V) integers, the patches that are kept, in this order; by default all.

        Returns:
          [class, distillation, registers, patches], those that the model has: (B, …, D). As a rule
          registers have no position (2309.16588 §2.2).
        """
        config, x = self.config, patches
        prefix = None
        if config.position_place == "stem":
            table = positions.table(self.position, config, x.dtype)
            table, prefix = table[:, config.prefix :], table[:, : config.prefix]
            x = x + table
        if visible is not None:
            if config.position_place in ("layers", "shared") or config.rope != "none":
                raise ConfigError(
                    "positions in every layer need all patches: say model.position_at=stem, and "
                    "no model.position=relative or model.rope"
                )
            x = jnp.take_along_axis(x, visible[..., None], axis=1)
        learned = [self.class_token] if config.has_class_token else []
        learned += [self.distillation_token] if config.distilled else []
        learned += [self.registers] if config.registers else []
        learned = [token[...].astype(x.dtype) for token in learned]
        if prefix is not None and config.prefix:
            ends = np.cumsum([token.shape[1] for token in learned])
            rows = jnp.split(prefix, ends[ends < config.prefix], 1)
            learned[: len(rows)] = [t + row for t, row in zip(learned, rows, strict=False)]
        return prepend(learned, x)

    def encode(
        self,
        x: jax.Array,
        *,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
        capture: Capture = False,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the encoder on what `place` gives; see `__call__`.

        Returns:
          The tokens after the last norm, without registers unless these are pooled too, and what
          was captured.
        """
        config = self.config
        rates = config.dropout, config.attention_dropout, config.drop_path
        embed_key, encoder_key = split(draw(rngs, deterministic, *rates), 2)
        x = dropout(x, config.dropout, embed_key)
        position = None
        if config.position_place == "shared":
            position = positions.of_layer(self.position, config, x.dtype)
        x = self.pre_norm(x) if config.pre_norm else x
        angles = rotary.angles(self.rope, config)
        tokens, intermediates = self.encoder(x, encoder_key, capture, position, angles)
        if config.registers and not config.pool_prefix:
            placed = config.placed_tokens
            tokens = jnp.concatenate(
                [tokens[:, :placed], tokens[:, placed + config.registers :]], axis=1
            )
        return tokens, intermediates

    def read(self, tokens: jax.Array, intermediates: dict[str, jax.Array]) -> ModelOutput:
        """The model's output for the tokens that `encode` gives."""
        config = self.config
        if config.two_heads:
            features = tokens[:, :2].mean(axis=1)
            if not config.num_classes:
                return ModelOutput(None, features, tokens, intermediates)
            exits = jnp.stack([
                self.head(tokens[:, 0].astype(jnp.float32)),
                self.head_distilled(tokens[:, 1].astype(jnp.float32)),
            ])  # fmt: skip
            return ModelOutput(exits.mean(axis=0), features, tokens, intermediates, exits)
        skipped = 0 if config.reads_class_token or config.pool_prefix else config.placed_tokens
        features = self.pool(tokens[:, skipped:] if skipped else tokens)
        if config.last_norm == "pooled":
            features = self.pool_norm(features)
        if config.representation:
            features = jnp.tanh(self.representation(features))
        logits = self.head(features.astype(jnp.float32)) if config.num_classes else None
        return ModelOutput(logits, features, tokens, intermediates)
