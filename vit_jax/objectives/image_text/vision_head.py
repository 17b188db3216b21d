"""What dino.txt trains on top of a frozen image tower (arXiv 2412.16334 §3; facebookresearch/dinov3, eval/text): blocks
on its class token and patches, whose class token and mean of patches are the image's vector.

The blocks see no registers, which models do not give; the authors' do.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.compute.dropout import draw_key
from vit_jax.models import layer_features
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.contract import ModelOutput
from vit_jax.models.layers import Linear
from vit_jax.models.zoo.vit_zoo_blocks import PublishedEncoder
from vit_jax.models.zoo.vit_zoo_options import PublishedViTConfig

_FIELDS = "config.objective.image_blocks"


def blocks_of(model: ClassifierConfig, depth: int, drop_path: float) -> PublishedViTConfig:
    """The blocks on top of a model, which compute as the model's do: SwiGLU of two thirds of four times the width,
    rounded up to a multiple of 64.

    Raises:
      ConfigError: the model has no class token, no grid of patches or no heads.
    """
    (tokens,) = layer_features.abstract(model)
    if not tokens.has_class_token or tokens.grid is None:
        raise ConfigError(
            f"{_FIELDS} = {depth}: the vector of an image is its class token and the mean of its patches, and this "
            "image tower does not have both: set it to 0, or take another model"
        )
    width = tokens.tokens.shape[-1]
    shared = {name: getattr(model, name) for name in ("dtype", "dtype_on_cpu", "remat", "unroll")}
    return PublishedViTConfig(
        image_size=1,
        patch=1,
        num_classes=0,
        position="none",
        depth=depth,
        width=width,
        heads=getattr(model, "heads", 0) or max(1, width // 64),
        mlp_dim=-(-int(4 * width * 2 / 3) // 64) * 64,
        activation="silu",
        gated_mlp=True,
        layer_scale="all",
        drop_path=drop_path,
        drop_path_by="constant",
        **shared,
    )


class VisionHead(nnx.Module):
    """Blocks, a norm, and a linear layer where vectors have another size than two tokens."""

    def __init__(self, blocks: PublishedViTConfig, outputs: int, rngs: nnx.Rngs):
        """`outputs`: size of an image's vector."""
        if outputs % 2:
            raise ConfigError(
                f"config.objective.embed = {outputs} must be even: half of it is of the class token, half of patches"
            )
        dtype, width = jnp.dtype(blocks.dtype), blocks.width
        self.encoder = PublishedEncoder(blocks, dtype=dtype, rngs=rngs)
        same = outputs == 2 * width
        self.projection = (
            None if same else Linear(width, outputs // 2, use_bias=False, dtype=dtype, rngs=rngs)
        )

    def __call__(
        self, output: ModelOutput, model: ClassifierConfig, rngs: nnx.Rngs | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Of a model's output the class token (B, E / 2) and the patches (B, N, E / 2).

        Args:
          model: its config.
          rngs: of training, for stochastic depth.
        """
        last = layer_features.last(output, model)
        x = jnp.concatenate([last.class_token[:, None], last.patches], axis=1)
        key = draw_key(rngs, rngs is None, self.encoder.config.drop_path)
        x, _ = self.encoder(x, key)
        x = x if self.projection is None else self.projection(x)
        return x[:, 0], x[:, 1:]


def head_flops(blocks: PublishedViTConfig, patches: int, outputs: int) -> int:
    """Operations for an image of so many patches."""
    tokens, width = patches + 1, blocks.width
    projected = 0 if outputs == 2 * width else tokens * width * outputs
    return blocks.block_flops(tokens) + projected
