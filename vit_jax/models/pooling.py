"""From tokens to one vector: class token, mean, attention pooling."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models.attention import Attention
from vit_jax.models.layers import Mlp, layer_norm


def token(tokens: jax.Array) -> jax.Array:
    """The class token (ViT Eq. 4): tokens (B, N, D) -> (B, D)."""
    return tokens[:, 0]


def mean(tokens: jax.Array) -> jax.Array:
    """Global average pooling (ViT §D.3): tokens (B, N, D) -> (B, D)."""
    return tokens.mean(axis=1)


class AttentionPooling(nnx.Module):
    """MAP head: a learnt probe attends to the tokens, then a residual MLP (Scaling ViT §3.2;
    big_vision's MAPHead).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        hidden: int,
        *,
        epsilon: float,
        activation: str,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.probe = nnx.Param(nnx.initializers.xavier_uniform()(rngs.params(), (1, 1, width)))
        self.attention = Attention(width, heads, dtype=dtype, rngs=rngs)
        self.norm = layer_norm(width, epsilon, dtype, rngs)
        self.mlp = Mlp(width, hidden, activation=activation, dropout=0.0, dtype=dtype, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens (B, N, D) -> (B, D)."""
        probe = jnp.broadcast_to(
            self.probe[...].astype(tokens.dtype), (tokens.shape[0], 1, tokens.shape[-1])
        )
        x, _ = self.attention(tokens, queries=probe)
        return (x + self.mlp(self.norm(x)))[:, 0]
