"""Transformer encoder: pre-norm blocks, stacked along a leading `layers` axis and run by `jax.lax.scan`."""

import functools

import jax
import numpy as np
from flax import nnx

from vit_jax import parallel
from vit_jax.models.attention import Attention
from vit_jax.models.layers import Mlp, drop_path, layer_norm, split

_SAVEABLE = jax.checkpoint_policies
REMAT = {
    "none": None,
    "full": _SAVEABLE.nothing_saveable,
    "dots": _SAVEABLE.dots_saveable,
    "weight_dots": _SAVEABLE.dots_with_no_batch_dims_saveable,
}


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3)."""

    def __init__(self, config, *, dtype, rngs: nnx.Rngs):
        norm = functools.partial(layer_norm, config.width, config.epsilon, dtype, rngs)
        self.attention_norm = norm()
        self.attention = Attention(
            config.width,
            config.heads,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            qk_norm=config.qk_norm,
            epsilon=config.epsilon,
            dtype=dtype,
            rngs=rngs,
        )
        self.mlp_norm = norm()
        self.mlp = Mlp(
            config.width, config.mlp_dim, activation=config.activation, dropout=config.dropout, dtype=dtype, rngs=rngs
        )

    def __call__(self, x: jax.Array, drop_path_rate: jax.Array, key: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """x (B, N, D) -> the same and the attention weights (B, H, N, N)."""
        keys = split(key, 4)
        y, weights = self.attention(self.attention_norm(x), key=keys[0])
        x = x + drop_path(y, drop_path_rate, keys[1])
        y = self.mlp(self.mlp_norm(x), key=keys[2])
        return x + drop_path(y, drop_path_rate, keys[3]), weights


class Encoder(nnx.Module):
    """`depth` blocks and one last norm. Every parameter below `layers` has a leading axis of length `depth`."""

    def __init__(self, config, *, dtype, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=config.depth)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Block(config, dtype=dtype, rngs=rngs)

        self.layers = stack(rngs)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs)
        self.config = config

    def __call__(
        self, x: jax.Array, key: jax.Array | None = None, capture: bool = False
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the blocks.

        Args:
          x: (B, N, D).
          key: randomness of dropout and stochastic depth; `None` for none.
          capture: also return `attention` (L, B, H, N, N) and `blocks` (L, B, N, D).

        Returns:
          tokens (B, N, D) after the last norm, and what was captured.
        """
        config = self.config
        definition, parameters = nnx.split(self.layers)
        # Stochastic depth grows linearly from 0 in the first block (arXiv 1603.09382 §3).
        rates = np.linspace(0, config.drop_path, config.depth, dtype=np.float32)
        stochastic = key is not None and (config.dropout or config.attention_dropout or config.drop_path)
        keys = jax.random.split(key, config.depth) if stochastic else None

        def block(x, layer):
            layer_parameters, rate, layer_key = layer
            x, weights = nnx.merge(definition, layer_parameters)(x, rate, layer_key)
            x = parallel.constrain_batch(x)
            return x, {"attention": weights, "blocks": x} if capture else {}

        unroll = min(config.unroll or config.depth, config.depth)
        if config.remat != "none":
            # A loop keeps XLA from sharing what the backward pass recomputes with the forward pass. Blocks that
            # unrolling leaves outside one are open to it: on TPU nothing is then recomputed, and no memory saved.
            outside_loop = unroll == config.depth or config.depth % unroll > 0
            block = jax.checkpoint(block, policy=REMAT[config.remat], prevent_cse=outside_loop)
        x, captured = jax.lax.scan(block, x, (parameters, rates, keys), unroll=unroll)
        return self.norm(x), captured
