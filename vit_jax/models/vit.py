"""Vision Transformer (arXiv 2010.11929), from Ti to 22B, as the official code and big_vision define it."""

import dataclasses
import re

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import pooling
from vit_jax.models.embeddings import PatchEmbedding, sincos_2d
from vit_jax.models.encoder import REMAT, Encoder
from vit_jax.models.layers import ACTIVATIONS, ModelOutput, dropout
from vit_jax.schema import ConfigError, nearest, option

# depth, width, MLP width, heads. Ti, S: AugReg Table 1; B, L, H: ViT Table 1; g, G: Scaling ViT Table 2; the others
# big_vision. 22B: width, depth and heads from secondary listings, MLP width from the parameter count (unconfirmed in a
# primary source); its blocks here are those of the others with normed queries and keys, not parallel and without biases.
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
# Listed by `vit_jax models`; any other patch size works as well.
VARIANTS = [
    "ViT-mu/16", "ViT-s/28", "ViT-s/16", "ViT-Ti/16", "ViT-S/32", "ViT-S/16", "ViT-M/16", "ViT-B/32", "ViT-B/16",
    "ViT-B/8", "ViT-L/32", "ViT-L/16", "ViT-So400m/14", "ViT-H/14", "ViT-g/14", "ViT-g-opt/16", "ViT-G/14", "ViT-G-opt/16",
    "ViT-e/14", "ViT-22B/14",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Config:
    """A ViT. `image_size` in pixels comes from the data."""

    image_size: int
    num_classes: int = option(1000, "outputs of the head; 0: no head", minimum=0)
    patch: int = option(16, "side of a patch in pixels", minimum=1)
    depth: int = option(12, "number of blocks", minimum=1)
    width: int = option(768, "size of a token", minimum=1)
    mlp_dim: int = option(3072, "hidden size of the MLPs", minimum=1)
    heads: int = option(12, "attention heads", minimum=1)
    pool: str = option("token", "how tokens become one vector", choices=("token", "mean", "map"))
    representation: int = option(0, "size of a tanh layer before the head, as a rule the width; 0: none", minimum=0)
    position: str = option("learned", "position embeddings", choices=("learned", "sincos2d", "none"))
    position_of_class: bool = option(True, "the class token has a learned position too (official code; not big_vision)")
    dropout: float = option(0.0, "after the position embedding, attention and MLP layers (ViT B.1)", minimum=0)
    attention_dropout: float = option(0.0, "on the attention weights", minimum=0)
    drop_path: float = option(0.0, "stochastic depth of the last block, growing linearly from 0", minimum=0)
    qk_norm: bool = option(False, "layer norm on queries and keys (ViT-22B)")
    activation: str = option("gelu_tanh", "of the MLPs", choices=ACTIVATIONS)
    epsilon: float = option(1e-6, "of the layer norms")
    head_init: str = option("zeros", "initial head kernel: zeros, or normal with std 0.02", choices=("zeros", "normal"))
    head_bias: float = option(0.0, "initial head bias; -10 for sigmoid loss on many classes")
    dtype: str = option("float32", "type of the computation; parameters are float32", choices=("float32", "bfloat16"))
    remat: str = option("none", "what the backward pass recomputes instead of storing", choices=REMAT)
    unroll: int = option(1, "blocks compiled side by side; 0: all (fastest on CPU and GPU, slowest compile)", minimum=0)

    def __post_init__(self):
        if self.image_size % self.patch:
            raise ConfigError(
                f"image size {self.image_size} cannot be cut into patches of {self.patch}: choose a multiple of the patch"
            )
        if self.width % self.heads:
            raise ConfigError(f"model width {self.width} cannot be cut into {self.heads} heads")
        if self.position == "sincos2d" and (self.width % 4 or self.width < 8):
            raise ConfigError(f"position sincos2d needs a model width of 8 or more that 4 divides, not {self.width}")
        if self.representation is True:
            raise ConfigError(f"model.representation is a size: say {self.width}, the model's width, not True")
        for name in ("dropout", "attention_dropout", "drop_path"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"model.{name} = {getattr(self, name)} is a probability: at least 0 and below 1")

    @property
    def grid(self) -> tuple[int, int]:
        """Patches down and across."""
        return (self.image_size // self.patch,) * 2

    @property
    def tokens(self) -> int:
        """Tokens in the encoder."""
        return self.grid[0] * self.grid[1] + (self.pool == "token")

    @property
    def prefix(self) -> int:
        """Rows of the position embedding that stand for no patch."""
        return int(self.pool == "token" and self.position == "learned" and self.position_of_class)

    def flops(self) -> int:
        """Operations of one image's forward pass: matrix products only, a multiply-add counted as 2, full attention."""
        n, d, m = self.tokens, self.width, self.mlp_dim
        patches = self.grid[0] * self.grid[1]
        block = 8 * n * d * d + 4 * n * n * d + 4 * n * d * m
        # The probe's own projections, the keys and values of all tokens, the MLP of one token.
        pool = 4 * n * d * d + 4 * n * d + 4 * d * d + 4 * d * m if self.pool == "map" else 0
        head = 2 * d * self.representation + 2 * (self.representation or d) * self.num_classes
        return 2 * patches * self.patch**2 * 3 * d + self.depth * block + pool + head


def options_from_name(name: str) -> dict | None:
    """`ViT-B/16` -> its size and patch; `None` for a name of another family."""
    match = re.fullmatch(r"ViT-(.+)/([1-9]\d*)", name)
    if not match:
        return None
    size, patch = match.groups()
    if size not in SIZES:
        raise ConfigError(f"model {name!r}: there is no ViT of size {size!r}{nearest(size, SIZES)}")
    depth, width, mlp_dim, heads = SIZES[size]
    options = dict(patch=int(patch), depth=depth, width=width, mlp_dim=mlp_dim, heads=heads)
    return options | (dict(qk_norm=True, pool="map") if size == "22B" else {})


class Model(nnx.Module):
    """Images to logits; see `Config` for what varies. Parameters are float32 whatever the compute dtype."""

    def __init__(self, config: Config, *, rngs: nnx.Rngs):
        dtype = jnp.dtype(config.dtype)
        width = config.width
        self.config = config
        self.embedding = PatchEmbedding(config.patch, 3, width, dtype=dtype, rngs=rngs)
        if config.pool == "token":
            self.class_token = nnx.Param(jnp.zeros((1, 1, width)))
        if config.position == "learned":
            rows = config.grid[0] * config.grid[1] + config.prefix
            self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (1, rows, width)))
        self.encoder = Encoder(config, dtype=dtype, rngs=rngs)
        if config.pool == "map":
            self.pool = pooling.AttentionPooling(
                width,
                config.heads,
                config.mlp_dim,
                epsilon=config.epsilon,
                activation=config.activation,
                dtype=dtype,
                rngs=rngs,
            )
        if config.representation:
            self.representation = nnx.Linear(width, config.representation, dtype=dtype, rngs=rngs)
        if config.num_classes:
            # The head computes in float32: logits and loss must not be rounded.
            self.head = nnx.Linear(
                config.representation or width,
                config.num_classes,
                kernel_init=nnx.initializers.zeros if config.head_init == "zeros" else nnx.initializers.normal(0.02),
                bias_init=nnx.initializers.constant(config.head_bias),
                rngs=rngs,
            )

    def __call__(
        self, images: jax.Array, *, deterministic: bool = True, rngs: nnx.Rngs | None = None, capture: bool = False
    ) -> ModelOutput:
        """Classifies images.

        Args:
          images: (B, S, S, 3) float, normalised; S is the config's image size.
          deterministic: no dropout, no stochastic depth.
          rngs: their randomness (the stream `dropout`) when not deterministic.
          capture: also return attention weights and every block's output.
        """
        config = self.config
        if images.shape[1:3] != (config.image_size,) * 2:
            size = config.image_size
            raise ValueError(f"images of {images.shape[1:3]} given to a model for {size}x{size}")
        if not deterministic and rngs is None and (config.dropout or config.attention_dropout or config.drop_path):
            raise ValueError("a model with dropout or stochastic depth needs rngs unless deterministic=True")
        embed_key, encoder_key = (None, None) if deterministic or rngs is None else jax.random.split(rngs.dropout())
        x = self._add_position(self.embedding(images))
        x = dropout(x, config.dropout, embed_key)
        tokens, intermediates = self.encoder(x, encoder_key, capture)
        features = self._pool(tokens)
        if config.representation:
            features = jnp.tanh(self.representation(features))
        logits = self.head(features.astype(jnp.float32)) if config.num_classes else None
        return ModelOutput(logits, features, tokens, intermediates)

    def _add_position(self, x: jax.Array) -> jax.Array:
        """Position embeddings and the class token, in the order that the checkpoint's rows ask for."""
        config = self.config
        position = None
        if config.position == "learned":
            position = self.position[...].astype(x.dtype)
        elif config.position == "sincos2d":
            position = jnp.asarray(sincos_2d(config.grid, config.width), x.dtype)
        if position is not None and not config.prefix:
            x = x + position
        if config.pool == "token":
            class_token = jnp.broadcast_to(self.class_token[...].astype(x.dtype), (x.shape[0], 1, config.width))
            x = jnp.concatenate([class_token, x], axis=1)
        if position is not None and config.prefix:
            x = x + position
        return x

    def _pool(self, tokens: jax.Array) -> jax.Array:
        if self.config.pool == "map":
            return self.pool(tokens)
        return {"token": pooling.token, "mean": pooling.mean}[self.config.pool](tokens)
