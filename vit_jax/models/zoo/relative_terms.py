"""Attention whose logits have the terms of Transformer-XL and of DeBERTa for the distances of patches, beside
q·k of their contents; `model.position=transformer_xl` and `deberta`.

A distance i - j of a query's patch i to a key's patch j is one in the row of all patches, as of `position=relative`.
Tokens that are no patches have no distance: their logits have no term of one. The parameters of distances
(`position`) are of one layer or of all; what projects them to heads is each layer's own.
"""

import math

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import relative
from vit_jax.compute.dense import product
from vit_jax.models.zoo.vit_zoo_blocks import PublishedAttention


class TransformerXLAttention(PublishedAttention):
    """((q_i + u)·k_j + (q_i + v)·W_R R_{i-j}) / √C (Transformer-XL, arXiv 1901.02860 §3.3; of both directions, as
    XLNet has it). R are fixed sinusoids; u and v of each head are `position` (2, H, C), and W_R is `distance_keys`.
    """

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, **options):
        super().__init__(width, heads, rngs=rngs, **options)
        self.distance_keys = _Projection(width, heads, rngs)

    def attend(self, q, k, v, *, key, bias, lengths=None) -> tuple[jax.Array, jax.Array]:
        """As `Attention.attend`; `bias` are R (2N - 1, D), and u and v, from `relative.bias`."""
        embeddings, position = bias
        of_content, of_distance = position * self.query_scale
        # Added to queries that are divided by √C and have u.
        moved = (of_distance - of_content) / math.sqrt(q.shape[-1])
        keys = self.distance_keys(embeddings.astype(self.dtype))
        terms = jax.tree_util.Partial(_moved_products, keys, moved)
        q = (q + of_content).astype(q.dtype)
        return super().attend(q, k, v, key=key, bias=terms, lengths=lengths)


class DisentangledAttention(PublishedAttention):
    """(q_i·k_j + q_i·W_K P_{i-j} + k_j·W_Q P_{j-i}) / √(3C) (DeBERTa, arXiv 2006.03654 §3.1, Eq. 4). P (2N - 1, D) is
    `position`, W_K and W_Q are `distance_keys` and `distance_queries`. The longest distances have embeddings of their
    own, as an image has few. (transformers takes W_Q P_{i-j}, the opposite of the equation.)
    """

    def __init__(self, width: int, heads: int, *, rngs: nnx.Rngs, **options):
        super().__init__(width, heads, rngs=rngs, **options)
        self.distance_keys = _Projection(width, heads, rngs)
        self.distance_queries = _Projection(width, heads, rngs)

    def attend(self, q, k, v, *, key, bias, lengths=None) -> tuple[jax.Array, jax.Array]:
        """As `Attention.attend`; `bias` is P (2N - 1, D), from `relative.bias`."""
        embeddings = bias.astype(self.dtype)
        projected = self.distance_keys(embeddings), self.distance_queries(embeddings)
        terms = jax.tree_util.Partial(_disentangled, *projected, k, jnp.float32(self.query_scale))
        q = (q / math.sqrt(3)).astype(q.dtype)
        return super().attend(q, k, v, key=key, bias=terms, lengths=lengths)


def _moved_products(keys: jax.Array, moved: jax.Array, q: jax.Array) -> jax.Array:
    """Keys of distances (2N - 1, H, C), what is added to the scaled queries (H, C), these (B, T, H, C) ->
    (B, H, T, T).
    """
    return relative.logits(keys, (q + moved).astype(q.dtype))


def _disentangled(keys, queries, k, scale, q) -> jax.Array:
    """Keys and queries of distances (2N - 1, H, C), keys of tokens (B, T, H, C), queries that are divided by √(3C) ->
    (B, H, T, T).
    """
    of_keys = relative.logits(queries, k).swapaxes(-1, -2)
    return relative.logits(keys, q) + of_keys * (scale / math.sqrt(3 * k.shape[-1]))


class _Projection(nnx.Module):
    """A matrix `kernel` (D, H, C), which begins as attention's others."""

    def __init__(self, width: int, heads: int, rngs: nnx.Rngs):
        init = nnx.initializers.variance_scaling(1.0, "fan_avg", "uniform", 0, (1, 2))
        self.kernel = nnx.Param(init(rngs.params(), (width, heads, width // heads)))

    def __call__(self, embeddings: jax.Array) -> jax.Array:
        """(S, D) -> (S, H, C)."""
        kernel = self.kernel[...].astype(embeddings.dtype)
        return product("sd,dhc->shc", embeddings, kernel).astype(embeddings.dtype)
