"""Gram anchoring (DINOv3, arXiv 2508.10104 §4.2): how alike the patches of an image are to each other stays as an
earlier checkpoint had it, while the features themselves continue learning.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.embeddings import pytorch_cubic
from vit_jax.objectives.dino.losses import unit


def loss(student: jax.Array, teacher: jax.Array) -> jax.Array:
    """The mean squared difference of all pairs' cosines, of each image: features (…, N, D) -> (…), float32."""
    pairs = [
        _cosines(x.astype(jnp.promote_types(x.dtype, jnp.float32))) for x in (student, teacher)
    ]
    return jnp.mean(jnp.square(pairs[0] - pairs[1]), axis=(-2, -1))


def resized(features: jax.Array, grid: tuple[int, int], new_grid: tuple[int, int]) -> jax.Array:
    """Features of patches (…, h * w, D) at another grid: bicubic as PyTorch does it, without antialiasing."""
    if grid == new_grid:
        return features
    rows, columns = _matrices(grid, new_grid)
    x = features.astype(jnp.promote_types(features.dtype, jnp.float32))
    x = x.reshape(*x.shape[:-2], *grid, x.shape[-1])
    exact = jax.lax.Precision.HIGHEST
    x = jnp.einsum("yh,...hwd->...ywd", rows.astype(x.dtype), x, precision=exact)
    x = jnp.einsum("xw,...ywd->...yxd", columns.astype(x.dtype), x, precision=exact)
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


@functools.lru_cache(maxsize=16)
def _matrices(grid: tuple[int, int], new_grid: tuple[int, int]) -> list[np.ndarray]:
    sides = zip(new_grid, grid, strict=True)
    return [pytorch_cubic(new, old, old / new) for new, old in sides]


def _cosines(x: jax.Array) -> jax.Array:
    x = unit(x)
    return jnp.einsum("...nd,...md->...nm", x, x, precision=jax.lax.Precision.HIGHEST)
