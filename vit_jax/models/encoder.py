"""Transformer encoder: pre-norm blocks, stacked along a leading `layers` axis and run by
`jax.lax.scan`.
"""

import functools
from typing import TYPE_CHECKING

import jax
from flax import nnx

from vit_jax.compute import choices, relative, stack, tokens
from vit_jax.compute.dropout import by_depth, drop_path, split
from vit_jax.compute.tokens import Tokens
from vit_jax.models import pooling, positions
from vit_jax.models.attention import Attention
from vit_jax.models.layers import Mlp, layer_norm

if TYPE_CHECKING:
    from vit_jax.models.vit import Config


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)) (ViT Eq. 2 and 3).

    With `config.parallel` both work on the same x, of which one norm is taken:
    x + attention(norm(x)) + mlp(norm(x)) (ViT-22B §2). Before that, x may get positions.
    """

    def __init__(self, config: "Config", *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        norm = functools.partial(
            layer_norm, config.width, config.epsilon, dtype, rngs, bias=config.norm_bias
        )
        own_position = config.position_place == "layers"
        self.position = positions.variables(config, rngs) if own_position else None
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
        self.config = config

    def __call__(
        self,
        x: Tokens,
        drop_path_rate: jax.Array,
        key: jax.Array | None,
        position: jax.Array | None = None,
    ) -> tuple[Tokens, jax.Array]:
        """Tokens (B, N, D) -> the same, and the attention weights (B, H, N, N).

        Args:
          position: that all layers share, from `positions.of_layer`.
        """
        keys = split(key, 4)
        if self.position is not None:
            dtype = jax.tree.leaves(x)[0].dtype
            position = positions.of_layer(self.position, self.config, dtype)
        bias = None
        if self.config.biased_attention:
            bias = relative.bias(position)
        elif position is not None:
            x = positions.add(x, position)
        y = self.attention_norm(x)
        attended, weights = self.attention(y, key=keys[0], bias=bias)
        x = _add(x, attended, drop_path_rate, keys[1])
        y = y if self.config.parallel else self.mlp_norm(x)
        return _add(x, self.mlp(y, key=keys[2]), drop_path_rate, keys[3]), weights


class Encoder(nnx.Module):
    """`depth` blocks and one norm, of the last one's output or of a weighted sum of all. Every parameter
    below `layers` has a leading axis of length `depth`.
    """

    def __init__(self, config: "Config", *, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs):
        self.layers = stack.stack(
            lambda rngs: Block(config, dtype=dtype, rngs=rngs), config.depth, rngs
        )
        if config.weighted_layers:
            self.layer_weights = pooling.LayerWeights(config.depth)
        self.norm = layer_norm(config.width, config.epsilon, dtype, rngs, bias=config.norm_bias)
        self.config = config

    def __call__(
        self,
        x: jax.Array,
        key: jax.Array | None = None,
        capture: bool = False,
        position: jax.Array | None = None,
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Runs the blocks.

        Args:
          x: (B, N, D).
          key: randomness of dropout and stochastic depth; `None` for none.
          capture: also return `attention` (L, B, H, N, N) and `blocks` (L, B, N, D).
          position: that all layers share, from `positions.of_layer`.

        Returns:
          tokens (B, N, D) after the last norm, and what was captured.
        """
        config = self.config

        def step(block, x, rate, key):
            x, weights = block(x, rate, key, position)
            return x, {"attention": weights, "blocks": x} if capture else {}

        # Dropout draws for all tokens at once; what is captured, or added to logits, is of all tokens.
        whole = capture or (key is not None and (config.dropout or config.attention_dropout))
        whole = whole or config.biased_attention
        scan = self.layer_weights.scan if config.weighted_layers else stack.scan
        x, captured = scan(
            step,
            self.layers,
            x if whole else self.layers.attention.cut(x),
            by_depth(config.drop_path, config.depth, key),
            remat=choices.remat(config),
            unroll=config.unroll,
        )
        return self.norm(tokens.join(x)), captured


def _add(x: Tokens, y: Tokens, drop_path_rate: jax.Array, key: jax.Array | None) -> Tokens:
    """x + y, without y for images whose residual is dropped: those of all parts, by one key."""
    return jax.tree.map(lambda x, y: x + drop_path(y, drop_path_rate, key), x, y)
