"""Masks made of rectangles of patches, as BEiT and iBOT draw them (arXiv 2106.08254 §2.3, algorithm 1)."""

import math

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning

_SMALLEST = 4  # patches of a rectangle
_NARROWEST = 0.3  # aspect ratio; the widest is its inverse
_ATTEMPTS = 10  # in a row that fail


def draw(key: jax.Array, counts: jax.Array, grid: tuple[int, int]) -> jax.Array:
    """Masks of at most `counts` patches each, (B, rows · columns) bool.

    A mask is a union of rectangles. Each has at least 4 patches and at most as many as are wanted still,
    an aspect ratio that is log-uniform between 0.3 and its inverse, a random place, and is smaller
    than the grid both ways. One that adds no patch or too many is drawn again; after ten such in a row
    the mask stays as it is.

    Args:
      key: random key.
      counts: (B,) int32.
      grid: rows and columns of patches.
    """
    rows, columns = grid
    y, x = jnp.arange(rows)[:, None], jnp.arange(columns)

    def one(key: jax.Array, wanted: jax.Array) -> jax.Array:
        def unfinished(state):
            _, count, failed, _ = state
            return (count < wanted) & (failed < _ATTEMPTS)

        def attempt(state):
            mask, count, failed, number = state
            left = wanted - count
            area_key, aspect_key, place_key = jax.random.split(jax.random.fold_in(key, number), 3)
            area = _SMALLEST + jax.random.uniform(area_key) * (left - _SMALLEST)
            extreme = -math.log(_NARROWEST)
            aspect = jnp.exp(jax.random.uniform(aspect_key, minval=-extreme, maxval=extreme))
            tall, wide = jnp.round(jnp.sqrt(area * aspect)), jnp.round(jnp.sqrt(area / aspect))
            down, across = jax.random.uniform(place_key, (2,))
            top = jnp.floor(down * (rows - tall + 1))
            left_edge = jnp.floor(across * (columns - wide + 1))
            box = (y >= top) & (y < top + tall) & (x >= left_edge) & (x < left_edge + wide)
            new = jnp.sum(box & ~mask)
            fits = (tall < rows) & (wide < columns) & (new > 0) & (new <= left)
            return (
                jnp.where(fits, mask | box, mask),
                jnp.where(fits, count + new, count),
                jnp.where(fits, 0, failed + 1),
                number + 1,
            )

        start = jnp.zeros((rows, columns), bool), jnp.int32(0), jnp.int32(0), jnp.int32(0)
        return jax.lax.while_loop(unfinished, attempt, start)[0].reshape(-1)

    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(counts.shape[0]))
    return partitioning.by_batch(jax.vmap(one), keys, counts)
