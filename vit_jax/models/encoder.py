"""Transformer encoder: pre-norm blocks, stacked along a leading `layers` axis and run by
`jax.lax.scan`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.compute import choices, stack
from vit_jax.compute.attend import Parts
from vit_jax.compute.dropout import drop_path, split
from vit_jax.models.attention import Attention
from vit_jax.models.layers import Mlp, layer_norm


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3).

    With `config.parallel` both work on the same x, of which one norm is taken:
    x + attention(norm(x)) + mlp(norm(x)) (ViT-22B §2).
    """

    def __init__(self, config, *, dtype, rngs: nnx.Rngs):
        norm = functools.partial(
            layer_norm, config.width, config.epsilon, dtype, rngs, bias=config.norm_bias
        )
        self.attention_norm = norm()
        self.attention = Attention(
            config.width,
            config.heads,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            qk_norm=config.qk_norm,
            qkv_bias=config.qkv_bias,
            norm_bias=config.norm_bias,
            epsilon=config.epsilon,
            implementation=config.attention,
            dtype=dtype,
            rngs=rngs,
        )
        if not config.parallel:
            self.mlp_norm = norm()
        self.mlp = Mlp(
            config.width,
            config.mlp_dim,
            activation=config.activation,
            dropout=config.dropout,
            dtype=dtype,
            rngs=rngs,
        )
        self.parallel = config.parallel

    def __call__(
        self, parts: Parts, drop_path_rate: jax.Array, key: jax.Array | None
    ) -> tuple[Parts, jax.Array | None]:
        """The tokens, in parts (B, N_i, D) -> the same, and of a single part the attention weights
        (B, H, N, N).
        """
        keys = split(key, 4)

        def add(parts, residuals, key):
            # One key: an image drops the residuals of all its parts or of none.
            return tuple(
                x + drop_path(y, drop_path_rate, key) for x, y in zip(parts, residuals, strict=True)
            )

        normed = tuple(map(self.attention_norm, parts))
        if len(parts) == 1:
            y, weights = self.attention(*normed, key=keys[0])
            residuals = (y,)
        else:
            residuals, weights = self.attention.of_parts(normed), None
        parts = add(parts, residuals, keys[1])
        normed = normed if self.parallel else tuple(map(self.mlp_norm, parts))
        return add(parts, self.mlp(normed, key=keys[2]), keys[3]), weights


class Encoder(nnx.Module):
    """`depth` blocks and one last norm. Every parameter below `layers` has a leading axis of length
    `depth`.
    """

    def __init__(self, config, *, dtype, rngs: nnx.Rngs):
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs, bias=config.norm_bias)
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
        # Stochastic depth grows linearly from 0 in the first block (arXiv 1603.09382 §3).
        rates = np.linspace(0, config.drop_path, config.depth, dtype=np.float32)
        stochastic = key is not None and (
            config.dropout or config.attention_dropout or config.drop_path
        )
        keys = jax.random.split(key, config.depth) if stochastic else None

        def step(block, parts, rate, key):
            parts, weights = block(parts, rate, key)
            return parts, {"attention": weights, "blocks": parts[0]} if capture else {}

        # Dropout draws for all tokens at once, and what is captured is of all tokens.
        whole = capture or (stochastic and (config.dropout or config.attention_dropout))
        cuts = [] if whole else choices.cuts(config.attention, tokens=x.shape[1])
        parts, captured = stack.scan(
            step,
            self.layers,
            tuple(jnp.split(x, cuts, axis=1)),
            (rates, keys),
            remat=choices.remat(config),
            unroll=config.unroll,
        )
        return self.norm(jnp.concatenate(parts, axis=1)), captured
