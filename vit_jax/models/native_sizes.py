"""Positions of images of sizes of their own, a `contract.PatchBatch`: each image has those of its own grid. All shapes
are static: a table of positions is resized by two small matrices of weights in closed form, without a gather or a loop
over grids (SigLIP 2, arXiv 2502.14786 §2.4.2).
"""

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.compute import rope
from vit_jax.models import classifier
from vit_jax.models.contract import PatchBatch


def resized_table(
    table: jax.Array, native: PatchBatch, config: classifier.ClassifierConfig
) -> jax.Array:
    """A table of learned positions, resized to the grid of each image.

    Args:
      table: (1, h * w, D), the positions of the model's own grid.
      config: of the model; `native_resize` and `native_aspect` are used where it has them.

    Returns:
      (B, N, D) in the dtype of `table`. Padding has the first patch's.
    """
    rows, columns = places(native)
    sizes = native.grids
    if getattr(config, "native_aspect", False):
        sizes = jnp.broadcast_to(sizes.max(1, keepdims=True), sizes.shape)
    method = getattr(config, "native_resize", "bilinear")
    down, across = (
        axis_weights(at, sizes[:, i], stored, method)
        for i, (at, stored) in enumerate(zip((rows, columns), config.grid, strict=True))
    )
    weights = (down[..., None] * across[..., None, :]).reshape(*down.shape[:2], -1)
    # Accelerators round the operands of products by default.
    exact = jax.lax.Precision.HIGHEST
    resized = jnp.einsum("bnp,pd->bnd", weights, table[0].astype(jnp.float32), precision=exact)
    return resized.astype(table.dtype)


def axis_weights(places: jax.Array, sizes: jax.Array, stored: int, method: str) -> jax.Array:
    """The weights of a table's stored rows (or columns) in those of other sizes, at half-pixel centres. Those of
    `bilinear` and `bicubic` are PyTorch's with antialiasing, and `jax.image.resize`'s.

    Args:
      places: (B, N) int32, which row of its size.
      sizes: (B,), how many rows each image has.
      stored: how many the table has.
      method: one of `positions.RESIZES`.

    Returns:
      (B, N, stored) float32, each of whose rows has the sum 1.
    """
    step = stored / sizes.astype(jnp.float32)[:, None]
    reach = jnp.ones_like(step) if method == "linear" else jnp.maximum(step, 1)
    centres = (places + 0.5) * step - 0.5
    distances = jnp.abs(jnp.arange(stored) - centres[..., None]) / reach[..., None]
    weights = (_cubic if method == "bicubic" else _triangle)(distances)
    return weights / weights.sum(-1, keepdims=True)


def _triangle(x: jax.Array) -> jax.Array:
    return jnp.maximum(0, 1 - x)


def _cubic(x: jax.Array) -> jax.Array:
    """Keys' cubic with a = -1/2."""
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return jnp.where(x <= 1, near, jnp.where(x < 2, far, 0))


def angles(
    native: PatchBatch, frequencies: jax.Array | None, config: classifier.ClassifierConfig
) -> jax.Array:
    """Rotary angles of the patches, as those of an image of that size alone (see `rotary.angles`).

    Args:
      frequencies: (2, L, H, C/2), those learned of `mixed`.

    Returns:
      (B, N, C/2) float32, or (L, B, N, H, C/2).
    """
    at = [axis.astype(jnp.float32) for axis in places(native)]
    if config.rope == "mixed":
        y, x = (axis[..., None, None] for axis in at)
        return rope.turned_by(y, x, frequencies[...][:, :, None, None])
    turns = rope.frequencies(config.width // config.heads, config.rope_theta)
    sizes = [native.grids[:, i : i + 1].astype(jnp.float32) for i in (0, 1)]
    if config.rope == "centred":
        turns = 2 * np.pi * turns
        at = [(axis + 0.5) / size * 2 - 1 for axis, size in zip(at, sizes, strict=True)]
    else:
        at = [axis + config.rope_offset for axis in at]
        if grid := config.rope_grid:
            at = [axis / size * old for axis, size, old in zip(at, sizes, grid, strict=True)]
    return jnp.concatenate([axis[..., None] * turns.astype(np.float32) for axis in at], axis=-1)


def places(native: PatchBatch) -> tuple[jax.Array, jax.Array]:
    """The row and the column of every patch, (B, N) int32; of padding those of the first one."""
    tokens = native.patches.shape[1]
    index, (rows, columns) = jnp.arange(tokens), (native.grids[:, i : i + 1] for i in (0, 1))
    index = jnp.where(index < rows * columns, index, 0)
    return index // columns, index % columns
