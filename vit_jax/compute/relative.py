"""What positions add to attention's logits. 1-D relative attention (ViT §D.4; arXiv 1803.02155 §3.2): an embedding for
every distance between two patches, which queries meet as if it were one more key. Relative position bias (BEiT,
arXiv 2106.08254): a number for every distance down and across, whatever the query.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.compute.dense import product


def bias_of_grid(table: jax.Array, grid: tuple[int, int]) -> jax.tree_util.Partial:
    """The `bias_of_pairs` that `attend` adds to the logits. It is a function of the queries, so that the backward pass
    stores the table instead of a number for each pair of tokens.
    """
    return jax.tree_util.Partial(_bias_function(grid), table)


@functools.cache
def _bias_function(grid: tuple[int, int]) -> Callable:
    """(table, scaled queries (B, T, H, C)) -> (B, H, T, T); the same object for a grid, as jit compares it."""

    def added(table, q):
        pairs = bias_of_pairs(table, grid, q.shape[1])
        return jnp.broadcast_to(pairs, (q.shape[0], *pairs.shape))

    return added


def bias_of_pairs(table: jax.Array, grid: tuple[int, int], tokens: int) -> jax.Array:
    """The number of each pair of tokens.

    Args:
      table: ((2h - 1)(2w - 1), H) or with three rows more, float32; row by row the distances from a key to a query
        down, and in each those across; then from another token to a patch, from a patch to one, and between two.
      grid: h, w of the patches.
      tokens: T >= hw, of which the last hw are the patches.

    Returns:
      (H, T, T) float32, of which [i, j] is of query i and key j.
    """
    (rows, columns), heads = grid, table.shape[1]
    count = (2 * rows - 1) * (2 * columns - 1)
    spread = table[:count].reshape(2 * rows - 1, 2 * columns - 1, heads)
    down, across = (np.arange(n)[:, None] - np.arange(n) + n - 1 for n in grid)
    # Rows, then columns: whole rows are gathered, and in the backward pass few are scattered.
    pairs = spread[down][:, :, across].transpose(4, 0, 2, 1, 3)
    pairs = pairs.reshape(heads, rows * columns, rows * columns)
    others = tokens - rows * columns
    if not others:
        return pairs
    to_patch, from_patch, between = table[count:, :, None, None]
    first = jnp.broadcast_to(to_patch, (heads, others, rows * columns))
    left = jnp.broadcast_to(from_patch, (heads, rows * columns, others))
    corner = jnp.broadcast_to(between, (heads, others, others))
    return jnp.block([[corner, first], [left, pairs]])


def distance_sinusoids(patches: int, width: int) -> jax.Array:
    """(2N - 1, D) float32, sines and then cosines of the distances -(N - 1) to N - 1, of frequency 10000^(-2i / D)
    (arXiv 1901.02860 §3.3, its code).
    """
    angles = np.arange(1 - patches, patches)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    table = np.concatenate([np.sin(angles), np.cos(angles)], 1)[:, :width]
    return jnp.asarray(table, jnp.float32)


def logits(table: jax.Array, q: jax.Array) -> jax.Array:
    """The product of each query with the embedding of its distance to each key.

    Args:
      table: (2N - 1, C), the embeddings of the distances -(N - 1) to N - 1 from a key to a query, N
        being the patches, that all heads share; or (2N - 1, H, C).
      q: (B, T, H, C), scaled queries of T >= N tokens, of which the last N are the patches in their
        order. To and from the others there is no distance: their logits are 0.

    Returns:
      (B, H, T, T) float32.
    """
    count = q.shape[1]
    others = count - (len(table) + 1) // 2
    # A row for each key's place less the query's, from -(T - 1), and one that nothing takes.
    around = [(others, others + 1), *[(0, 0)] * (table.ndim - 1)]
    keys = jnp.pad(table[::-1], around).astype(q.dtype)
    shared = table.ndim == 2
    products = _products(q, keys) if shared else _shift(product("bthc,shc->bhts", q, keys))
    if not others:
        return products
    patches = np.arange(count) >= others
    return jnp.where(np.outer(patches, patches), products, 0)


@jax.custom_vjp
def _products(q, keys):
    """q (B, T, H, C), keys (2T, C) -> (B, H, T, T), of which [i, j] is with the key j - i + T - 1."""
    return _forward(q, keys)[0]


def _forward(q, keys):
    q = q.swapaxes(1, 2)  # Before the product: its result is larger.
    return _shift(_contract(q, keys, [3], [1])), (q, keys)


def _backward(saved, dlogits):
    """Every product with what is smaller on the left, or summed over its last axes, which CPUs need."""
    q, keys = saved
    dlogits = _shift_back(dlogits.astype(q.dtype))
    dq = _contract(dlogits, keys, [3], [0]).astype(q.dtype)
    dkeys = _contract(jnp.moveaxis(q, -1, 0), dlogits, [1, 2, 3], [0, 1, 2])
    # In three axes: a plain transpose XLA for CPUs would undo by moving the larger factor after all.
    dkeys = dkeys.reshape(len(dkeys), 2, -1).transpose(1, 2, 0).reshape(keys.shape)
    return dq.swapaxes(1, 2), dkeys.astype(keys.dtype)


_products.defvjp(_forward, _backward)


def _shift(x):
    """(..., T, 2T) -> (..., T, T), of which row i begins in column T - 1 - i of x.

    Each row begins one earlier than the row before: in one sequence of all rows, they are 2T - 1 apart.
    """
    *batch, count, width = x.shape
    sequence = x.reshape(*batch, -1)[..., count - 1 : -1]
    return sequence.reshape(*batch, count, width - 1)[..., :count]


def _shift_back(x):
    """(..., T, T) -> (..., T, 2T), with zeros elsewhere."""
    *batch, count, _ = x.shape
    whole = [(0, 0)] * len(batch)
    rows = jnp.pad(x, (*whole, (0, 0), (0, count - 1)))
    sequence = jnp.pad(rows.reshape(*batch, -1), (*whole, (count - 1, 1)))
    return sequence.reshape(*batch, count, 2 * count)


def _contract(a, b, axes_of_a, axes_of_b):
    dimensions = ((axes_of_a, axes_of_b), ((), ()))
    return jax.lax.dot_general(a, b, dimensions, preferred_element_type=jnp.float32)
