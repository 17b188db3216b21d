"""Vision Transformer (arXiv 2010.11929), from Ti to 22B, as the official code and big_vision define it."""

# The network of the paper is `vit`; here are the names, and the model for what only published weights need.

import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute.dropout import draw_key, dropout, split
from vit_jax.models import classifier, pooling, positions, rotary
from vit_jax.models.contract import ModelOutput, PatchBatch
from vit_jax.models.embeddings import PatchEmbedding
from vit_jax.models.layers import draw_as_deit
from vit_jax.models.vit import VisionTransformer
from vit_jax.models.zoo import vit_zoo_blocks as blocks
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

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


def options_from_name(name: str) -> dict | None:
    """`ViT-B/16` -> its size and patch; `None` for a name of another family.

    A DeiT (arXiv 2012.12877) is a ViT with the exact GELU and first weights of its own; with `distilled=True` it is
    the paper's distilled one.
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
        options |= {"activation": "gelu", "init": "deit"}
    return options | (OPTIONS_22B if size == "22B" else {})


class PublishedViT(VisionTransformer):
    """The ViT of the paper with what published ones have beside it."""

    def __init__(self, config: PublishedViTConfig, *, rngs: nnx.Rngs):
        super().__init__(config, rngs=rngs)
        if config.init == "deit":
            draw_as_deit(self, rngs)

    def make_embedding(self, config: PublishedViTConfig, rngs: nnx.Rngs) -> nnx.Module:
        embedding = self.make_patches(config, rngs)
        if config.patch_norm:
            self.patch_norm = self.make_norm(config, rngs)(config.width)
        return embedding

    def make_patches(self, config: PublishedViTConfig, rngs: nnx.Rngs) -> nnx.Module:
        """From images (B, H, W, C) to tokens (B, N, D); a family that embeds otherwise has its own."""
        return PatchEmbedding(
            config.patch,
            config.channels,
            config.width,
            bias=config.patch_bias,
            crop=config.crop_to_patches,
            dtype=jnp.dtype(config.dtype),
            rngs=rngs,
        )

    def make_norm(self, config: PublishedViTConfig, rngs: nnx.Rngs) -> Callable:
        """A function that makes the config's norm of a width, as around and in the blocks."""
        return blocks.make_norm(config, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def make_position(self, config: PublishedViTConfig, rngs: nnx.Rngs):
        """The positions of the stem, or those that layers share; `None` where layers have their own."""
        of_model = config.position_place in ("stem", "shared")
        return positions.of(config).variables(rngs) if of_model else None

    def make_encoder(self, config: PublishedViTConfig, rngs: nnx.Rngs) -> nnx.Module:
        """The encoder, with rotary frequencies and the norm before it; a family whose blocks are others has its own."""
        self.rope = rotary.variables(config, rngs)
        if config.pre_norm:
            self.pre_norm = self.make_norm(config, rngs)(config.width)
        encoder = blocks.PublishedEncoder
        if config.token_merging:
            from vit_jax.models.zoo.merging import MergingEncoder as encoder
        elif config.differential:
            from vit_jax.models.zoo.differential import DifferentialEncoder as encoder
        return encoder(config, dtype=jnp.dtype(config.dtype), rngs=rngs)

    def make_pool(self, config: PublishedViTConfig, rngs: nnx.Rngs) -> Callable:
        pool = super().make_pool(config, rngs)
        if config.last_norm == "pooled":
            self.pool_norm = self.make_norm(config, rngs)(config.pooled_width)
        return pool

    def patches(self, images, *, deterministic=True, rngs=None) -> jax.Array:
        x = super().patches(images, deterministic=deterministic, rngs=rngs)
        return self.patch_norm(x) if self.config.patch_norm else x

    def add_positions(
        self,
        patches: jax.Array,
        visible: jax.Array | None = None,
        native: PatchBatch | None = None,
    ) -> jax.Array:
        in_layers = self.config.position_place in ("layers", "shared") or self.config.rope != "none"
        if visible is not None and in_layers:
            raise ConfigError(
                "positions in every layer need all patches: set model.position_at=stem, and "
                "no model.position=relative or model.rope"
            )
        return super().add_positions(patches, visible, native)

    def positions(self, dtype: jnp.dtype) -> jax.Array | None:
        if self.config.position_place != "stem":
            return None
        return super().positions(dtype)

    def encode(
        self, x, *, deterministic=True, rngs=None, capture=False, joining=None, native=None
    ) -> tuple[jax.Array, dict]:
        """Runs the blocks on placed tokens (B, N, D): tokens before the last norm, and what was captured. Registers
        stay where they are pooled too.
        """
        config = self.config
        placed = config.tokens_with_position
        rates = config.dropout, config.attention_dropout, config.drop_path
        first_key, key = split(draw_key(rngs, deterministic, *rates), 2)
        x = dropout(x, config.dropout, first_key)
        position = None
        if config.position_place == "shared":
            position = positions.of(config).of_layer(self.position, x.dtype, self.places)
        x = self.pre_norm(x) if config.pre_norm else x
        moves = config.rope_shift, config.rope_jitter, config.rope_rescale
        angles = rotary.angles(self.rope, config, draw_key(rngs, deterministic, *moves), native)
        more = {} if joining is None else {"joining": joining}  # which few encoders take
        more |= {} if native is None else {"lengths": native.lengths(x.shape[1])}
        x, captured = self.encoder(x, key, capture, position, angles, **more)
        if config.registers and not config.pool_prefix and joining is None:
            x = jnp.concatenate([x[:, :placed], x[:, placed + config.registers :]], axis=1)
        return x, captured

    def forward_head(
        self, tokens: jax.Array, captured: dict[str, jax.Array], native: PatchBatch | None = None
    ) -> ModelOutput:
        config = self.config
        if config.two_heads:
            return super().forward_head(tokens, captured, native)
        skipped = (
            0 if config.reads_class_token or config.pool_prefix else config.tokens_with_position
        )
        features = pooling.pooled(self.pool, tokens[:, skipped:] if skipped else tokens, native)
        if config.last_norm == "pooled":
            features = self.pool_norm(features)
        if config.representation:
            features = jnp.tanh(self.representation(features))
        return ModelOutput(self.classify(features), features, tokens, captured)


def build(config: PublishedViTConfig, *, rngs: nnx.Rngs) -> VisionTransformer:
    """The model of a config: the paper's own if nothing else is asked for."""
    return (VisionTransformer if config.of_paper else PublishedViT)(config, rngs=rngs)


NAME, Config, Model = "vit", PublishedViTConfig, build  # for the registry
