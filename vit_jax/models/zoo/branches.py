"""Two branches of Transformer blocks whose class tokens attend to the other branch's patches (arXiv
2103.14899 §3.2 and §3.3). The network around them is in `crossvit`.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.compute import choices, stack
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models import contract
from vit_jax.models.attention import Attention
from vit_jax.models.contract import Capture
from vit_jax.models.layers import Linear, layer_norm
from vit_jax.models.vit import Block, VisionTransformerConfig


class TwoBranchStage(nnx.Module):
    """The blocks of both branches, then cross-attention in both directions (§3.3)."""

    def __init__(
        self,
        branches: dict[str, VisionTransformerConfig],
        depths: tuple[int, int],
        *,
        dtype,
        rngs: nnx.Rngs,
    ):
        small, large = branches.values()
        self.small = Branch(small, depths[0], dtype=dtype, rngs=rngs)
        self.large = Branch(large, depths[1], dtype=dtype, rngs=rngs)
        self.small_to_large = CrossAttention(small, large, dtype=dtype, rngs=rngs)
        self.large_to_small = CrossAttention(large, small, dtype=dtype, rngs=rngs)
        self.remat = choices.remat(small)

    def __call__(
        self,
        small: jax.Array,
        large: jax.Array,
        rates: np.ndarray,
        key: jax.Array | None,
        capture: Capture,
    ) -> tuple[jax.Array, jax.Array, dict[str, jax.Array]]:
        """Runs the stage.

        Args:
          small, large: tokens of the branches, (B, N, D) each, class token first.
          rates: of stochastic depth, for the deeper branch's blocks; cross-attention has the last.
          key: randomness of stochastic depth; `None` for none.
          capture: see `crossvit.CrossViT`.

        Returns:
          small, large, and what was captured.
        """
        keys = split(key, 4)
        small, of_small = self.small(small, rates, keys[0], capture, "small_")
        large, of_large = self.large(large, rates, keys[1], capture)
        small_class, small_patches = small[:, :1], small[:, 1:]
        large_class, large_patches = large[:, :1], large[:, 1:]
        small_class, large_class = (
            stack.call(layer, tokens, rates[-1], key, remat=self.remat)
            for layer, tokens, key in (
                (self.small_to_large, (small_class, large_patches), keys[2]),
                (self.large_to_small, (large_class, small_patches), keys[3]),
            )
        )
        small = jnp.concatenate([small_class, small_patches], axis=1)
        large = jnp.concatenate([large_class, large_patches], axis=1)
        return small, large, of_large | of_small


class Branch(nnx.Module):
    """The blocks of one branch in a stage."""

    def __init__(self, config: VisionTransformerConfig, depth: int, *, dtype, rngs: nnx.Rngs):
        self.layers = stack.stack(lambda rngs: Block(config, dtype=dtype, rngs=rngs), depth, rngs)
        self.config, self.depth = config, depth

    def __call__(
        self,
        x: jax.Array,
        rates: np.ndarray,
        key: jax.Array | None,
        capture: Capture,
        prefix: str = "",
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Tokens (B, N, D) -> the same, and with `capture` the blocks' `attention` (L, B, H, N, N) and
        outputs `blocks` (L, B, N, D), their names after `prefix`.
        """

        def step(block, x, rate, key):
            x, weights = block(x, rate, key)
            return x, contract.captured(
                capture, **{f"{prefix}attention": weights, f"{prefix}blocks": x}
            )

        return stack.scan(
            step,
            self.layers,
            x,
            (rates[: self.depth], None if key is None else jax.random.split(key, self.depth)),
            remat=choices.remat(self.config),
            unroll=self.config.unroll,
        )


class CrossAttention(nnx.Module):
    """A branch's class token, projected to the other branch's width, attends to the other branch's patches
    and is projected back (Eq. 4 and 5).
    """

    def __init__(
        self, own: VisionTransformerConfig, other: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs
    ):
        self.project = Projection(own.width, other.width, own, dtype=dtype, rngs=rngs)
        self.attention_norm = layer_norm(other.width, own.epsilon, dtype, rngs)
        self.attention = Attention(other.width, other.heads, dtype=dtype, rngs=rngs)
        self.back = Projection(other.width, own.width, own, dtype=dtype, rngs=rngs)

    def __call__(
        self, tokens: tuple[jax.Array, jax.Array], drop_path_rate: float, key: jax.Array | None
    ) -> jax.Array:
        """Class token (B, 1, D) and the other branch's patches (B, N, E) -> the class token."""
        class_token, patches = tokens
        x = self.project(class_token)
        y = self.attention_norm(jnp.concatenate([x, patches], axis=1))
        attended, _ = self.attention(y, queries=y[:, :1])
        return self.back(x + drop_path(attended, drop_path_rate, key))


class Projection(nnx.Module):
    """Norm, activation, linear layer to another width."""

    def __init__(
        self, inputs: int, outputs: int, config: VisionTransformerConfig, *, dtype, rngs: nnx.Rngs
    ):
        init = nnx.initializers.xavier_uniform()
        self.norm = layer_norm(inputs, config.epsilon, dtype, rngs)
        self.linear = Linear(inputs, outputs, kernel_init=init, dtype=dtype, rngs=rngs)
        self.activation = config.activation

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., F)."""
        return self.linear(ACTIVATIONS[self.activation](self.norm(x)))
