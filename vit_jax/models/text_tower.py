"""Text towers that stand beside a ViT: tokens to one vector, in the ViT's own blocks (SigLIP, arXiv 2303.15343; CLIP,
arXiv 2103.00020 §2.4). How text becomes tokens is in `data.texts`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute import choices, stack
from vit_jax.compute.dropout import by_depth
from vit_jax.models.layers import Linear
from vit_jax.models.vit import Encoder
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

KINDS = ("siglip", "clip")
CONVENTIONS = {
    "siglip": {"activation": "gelu_tanh", "epsilon": 1e-6},
    "clip": {"activation": "quick_gelu", "epsilon": 1e-5},
}


@dataclasses.dataclass(frozen=True)
class TextTowerConfig:
    """A text tower.

    Attributes:
      kind: siglip: tokens see all others, padding too, and the last position is read; clip: tokens see those before
        them, and the first end token is read.
      vocabulary: rows of the table of tokens.
      length: tokens of a text, with padding.
      end: number of the token that ends a text.
      outputs: size of the result.
      blocks: of the tower, as those of a ViT, whose images do not count.
    """

    kind: str
    vocabulary: int
    length: int
    end: int
    outputs: int
    blocks: PublishedViTConfig

    def __post_init__(self):
        if self.length < 2:
            raise ConfigError(
                f"config.objective.text_length = {self.length} must be at least 2, for a token and the end of the text"
            )

    def flops(self) -> int:
        """Operations of a text's forward pass; see `Objective.flops`."""
        return self.blocks.block_flops(self.length) + 2 * self.blocks.width * self.outputs


def blocks_of(
    model: PublishedViTConfig, kind: str, activation: str = "", **sizes: int
) -> PublishedViTConfig:
    """The blocks of a text tower beside a model, which compute as the model's do.

    Args:
      model: of the images.
      kind: of the tower.
      activation: of its MLPs; '': that of the authors of its kind.
      **sizes: depth, width, mlp_dim and heads.
    """
    shared = {name: getattr(model, name) for name in ("dtype", "dtype_on_cpu", "remat", "unroll")}
    image = {"image_size": 1, "patch": 1, "num_classes": 0, "position": "none", "pool": "mean"}
    conventions = dict(CONVENTIONS[kind])
    if activation:
        conventions["activation"] = activation
    return PublishedViTConfig(**image, **shared, **conventions, **sizes)


class TextTower(nnx.Module):
    """Tokens (B, L) int32 to (B, outputs)."""

    def __init__(self, config: TextTowerConfig, rngs: nnx.Rngs):
        blocks, normal = config.blocks, nnx.initializers.normal
        dtype, width, clip = jnp.dtype(blocks.dtype), blocks.width, config.kind == "clip"
        scales = (0.02, 0.01) if clip else (width**-0.5,) * 2
        self.config = config
        self.token_table = nnx.Param(normal(scales[0])(rngs.params(), (config.vocabulary, width)))
        self.position = nnx.Param(normal(scales[1])(rngs.params(), (1, config.length, width)))
        self.encoder = (CausalEncoder if clip else Encoder)(blocks, dtype=dtype, rngs=rngs)
        self.head = Linear(width, config.outputs, use_bias=not clip, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (B, L) int32 -> (B, outputs), in the dtype of the tower."""
        config, dtype = self.config, jnp.dtype(self.config.blocks.dtype)
        x = self.token_table[...].astype(dtype)[tokens] + self.position[...].astype(dtype)
        x, _ = self.encoder(x)
        if config.kind == "siglip":
            return self.head(x[:, -1])
        ends = jnp.argmax(tokens == config.end, axis=1)
        return self.head(jnp.take_along_axis(x, ends[:, None, None], axis=1)[:, 0])


class CausalEncoder(Encoder):
    """An encoder whose tokens see themselves and those before them."""

    def __call__(self, x: jax.Array) -> tuple[jax.Array, dict]:
        """(B, N, D) -> the same, and nothing."""

        def step(block, x, rate, key):
            return block(x, rate, key, jax.tree_util.Partial(_hide_later))[0], {}

        loop = dict(remat=choices.remat(self.config), unroll=self.config.unroll)
        depths = by_depth(self.config.drop_path, self.config.depth, None)
        x, _ = stack.scan(step, self.layers, x, depths, **loop)
        return self.norm(x), {}


def _hide_later(queries: jax.Array) -> jax.Array:
    """What is added to the logits of queries (B, N, H, C), (B, H, N, N): next to nothing remains of later tokens."""
    batch, tokens, heads, _ = queries.shape
    # Half of the smallest number, so that a logit more does not make it infinite.
    later = jnp.finfo(jnp.float32).min / 2
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (tokens, tokens), i) for i in (0, 1))
    added = jnp.where(columns > rows, later, 0.0)
    return jnp.broadcast_to(added, (batch, heads, tokens, tokens))
