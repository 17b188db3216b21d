"""Attention in linear time: softmax's kernel exp(q·k) estimated by positive random features
(Performer, arXiv 2009.14794 §2.3 and Lemma 1), as the code of T2T-ViT computes it.

Heads are (B, N, H, C). All is computed in float32: the features are exponentials.
"""

import jax
import jax.numpy as jnp

from vit_jax.compute.dense import product

EPSILON = 1e-8  # added to the denominators


def features(x: jax.Array, directions: jax.Array) -> jax.Array:
    """φ(x) = exp(w·x − |x|²/2) / √M for each of M directions w: φ(q)·φ(k) estimates exp(q·k).

    Args:
      x: (B, N, H, C).
      directions: (M, C) float32.

    Returns:
      (B, N, H, M) float32.
    """
    x = x.astype(jnp.float32)
    half = jnp.square(x).sum(-1, keepdims=True) / 2
    projected = product("bnhc,mc->bnhm", x, directions)
    return jnp.exp(projected - half) / jnp.sqrt(len(directions))


def attend(q: jax.Array, k: jax.Array, v: jax.Array, directions: jax.Array) -> jax.Array:
    """An estimate of softmax(q kᵀ) v, of which no matrix over pairs of tokens is made.

    Args:
      q: queries (B, Q, H, C), scaled already.
      k, v: keys and values (B, N, H, C).
      directions: (M, C), see `orthogonal_directions`.

    Returns:
      (B, Q, H, C) in the dtype of v.
    """
    q, k = features(q, directions), features(k, directions)
    total = product("bqhm,bhm->bqh", q, k.sum(1))
    summed = product("bnhm,bnhc->bhmc", k, v.astype(jnp.float32))
    return (product("bqhm,bhmc->bqhc", q, summed) / (total + EPSILON)[..., None]).astype(v.dtype)


def orthogonal_directions(key: jax.Array, count: int, size: int) -> jax.Array:
    """Random directions (count, size) float32 for `features`.

    Up to `size` of them are orthogonal and of length √count; of more the columns are. Only from there
    on is the estimate one of exp(q·k): fewer directions are shorter than √size, as those of T2T-ViT are,
    and soften the softmax to about exp(q·k count / size).
    """
    return jax.nn.initializers.orthogonal(scale=count**0.5)(key, (count, size), jnp.float32)
