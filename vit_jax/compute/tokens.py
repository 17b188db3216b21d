"""Tokens of a batch of images, whole or in parts.

A class token beside 16 × 16 patches makes 257, for which a TPU computes and moves 384 wherever tokens
are the last axis. Cut into parts of 256 and 1, they take 478 instead of 609 M cycles a step of
ViT-H/14. What works on each token by itself works on each part by itself; attention sees all.
"""

import jax
import jax.numpy as jnp

from vit_jax.compute import choices

# (B, N, ...), or several (B, N_i, ...) which together are the tokens.
Tokens = jax.Array | tuple[jax.Array, ...]


def count(x: Tokens) -> int:
    """How many tokens an image has."""
    return sum(part.shape[1] for part in jax.tree.leaves(x))


def cut(x: jax.Array, *, implementation: str, head_size: int) -> Tokens:
    """x (B, N, ...), cut into parts where this implementation of attention (see `attend`) takes
    them and it pays.
    """
    tokens = count(x)
    chosen = choices.attention(
        implementation, queries=tokens, keys=tokens, head_size=head_size, dtype=x.dtype
    )
    places = cuts(tokens) if chosen == "xla" else []
    return tuple(jnp.split(x, places, axis=1)) if places else x


def join(x: Tokens) -> jax.Array:
    """The whole of what `cut` gives."""
    return x if isinstance(x, jax.Array) else jnp.concatenate(x, axis=1)


@choices.by_platform
def cuts(count: int) -> list[int]:
    """The places where `count` tokens are cut into parts: none, except on TPUs."""
    return []
