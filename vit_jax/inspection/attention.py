"""Quantities of attention weights: functions of arrays that give arrays, with JAX, so that they can run
inside a model's loop over layers (`models.contract.Capture`).

Weights are (…, queries, keys); the tokens before the patches (class, distillation, registers) are
those in excess of the grid.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

_EXACT = jax.lax.Precision.HIGHEST
Grid = tuple[int, int]  # patches down and across


def places(grid: Grid, size: tuple[float, float]) -> np.ndarray:
    """The centres of the patches, row by row, in pixels of an image of this height and width: (n, 2)."""
    sides = [
        (np.arange(count) + 0.5) * side / count for count, side in zip(grid, size, strict=True)
    ]
    return np.stack(np.meshgrid(*sides, indexing="ij"), axis=-1).reshape(-1, 2)


def distances(grid: Grid, size: tuple[float, float], *, with_class: bool = False) -> np.ndarray:
    """Pixels from each patch to each: (n, n) float64; with the class token first, which is thought to
    be in the centre of the image, (1 + n, 1 + n).
    """
    points = places(grid, size)
    if with_class:
        points = np.concatenate([[np.asarray(size, np.float64) / 2], points])
    return np.linalg.norm(points[:, None] - points[None], axis=-1)


def attention_distance(
    weights: jax.Array, grid: Grid, size: tuple[float, float], *, renormalise: bool = False,
    with_class: bool = False,
) -> jax.Array:  # fmt: skip
    """How far queries look: the distance to each key, weighted by attention, averaged over the queries
    (ViT §4.5, Fig. 7).

    As the authors count (an author in vision_transformer's issue 162): the class token's row and
    column are dropped, rows are not normalised again, and a patch's distance to itself, 0, counts.

    Args:
      weights: (…, T, T).
      grid: of the patches.
      size: height and width of the image in pixels.
      renormalise: what queries give to patches sums to 1.
      with_class: the class token is a query and a key, in the centre of the image; other learned
        tokens are not.

    Returns:
      (…) pixels.
    """
    count = grid[0] * grid[1]
    first = weights.shape[-1] - count
    kept = np.arange(first, first + count)
    if with_class:
        kept = np.concatenate([[0], kept])
    weights = weights[..., kept[:, None], kept] if with_class else weights[..., first:, first:]
    if renormalise:
        weights = weights / weights.sum(-1, keepdims=True)
    pixels = jnp.asarray(distances(grid, size, with_class=with_class), weights.dtype)
    return jnp.einsum("...qk,qk->...", weights, pixels, precision=_EXACT) / len(kept)


def rollout(weights: jax.Array, of: Callable = lambda joint: joint) -> jax.Array:
    """What reaches each token of every layer from each input token (attention rollout, arXiv 2005.00928).

    Args:
      weights: (L, …, T, T), averaged over heads.
      of: what is kept of each layer's (…, T, T); by default all.

    Returns:
      (L, …, T, T): after each layer the product of all (A + I), rows normalised, up to it.
    """
    identity = jnp.eye(weights.shape[-1], dtype=weights.dtype)

    def step(joint: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        mixed = layer + identity
        mixed = mixed / mixed.sum(-1, keepdims=True)
        joint = jnp.matmul(mixed, joint, precision=_EXACT)
        return joint, of(joint)

    first = jnp.broadcast_to(identity, weights.shape[1:])
    return jax.lax.scan(step, first, weights)[1]


def attention_read(weights: jax.Array, grid: Grid, *, class_token: bool) -> jax.Array:
    """What is read of a map (…, T, T): how much of each patch, (…, n), the class token takes; without
    one, the patches in the mean.
    """
    first = weights.shape[-1] - grid[0] * grid[1]
    if class_token:
        return weights[..., 0, first:]
    return weights[..., first:, first:].mean(-2)


def entropy(weights: jax.Array) -> jax.Array:
    """Of what each query gives to the keys, in nats, averaged over the queries: (…, Q, K) to (…). Not a
    number where weights are negative, as re-attention's may be.
    """
    return -jax.scipy.special.xlogy(weights, weights).sum(-1).mean(-1)


def logit_range(weights: jax.Array) -> jax.Array:
    """How far a query's largest logit is above the mean of its logits, at most over the queries: (…).

    Taken from the logarithms of the weights, which are the logits up to a constant; what is rounded
    to zero counts as the smallest number that floats have, so that very large ranges are bounds.
    Not a number where weights are negative.
    """
    smallest = jnp.finfo(weights.dtype).tiny
    logs = jnp.log(jnp.where(weights < 0, jnp.nan, jnp.maximum(weights, smallest)))
    return (logs.max(-1) - logs.mean(-1)).max(-1)


def similarity(weights: jax.Array) -> jax.Array:
    """How alike layers attend: the cosine of what a query gives to the keys in two layers, averaged over
    queries, heads and images (DeepViT, arXiv 2103.11886 §3.1).

    Args:
      weights: (L, …, K).

    Returns:
      (L, L), ones on the diagonal.
    """
    rows = weights.reshape(len(weights), -1, weights.shape[-1])
    rows = rows / jnp.linalg.norm(rows, axis=-1, keepdims=True)
    return jnp.einsum("pqk,rqk->pr", rows, rows, precision=_EXACT) / rows.shape[1]


def centre_share(maps: np.ndarray, grid: Grid) -> np.ndarray:
    """How much more than its area the middle quarter of the image (half its height and width) gets of
    maps (…, n): 1 if all places get the same.
    """
    down, across = (places(grid, (1.0, 1.0)) - 0.5).T
    # A patch that is partly inside counts partly.
    parts = [
        np.clip((0.25 + 0.5 / count - np.abs(offset)) * count, 0, 1)
        for offset, count in zip((down, across), grid, strict=True)
    ]
    inside = parts[0] * parts[1]
    maps = np.asarray(maps, np.float64)
    return (maps * inside).sum(-1) / maps.sum(-1) / inside.mean()
