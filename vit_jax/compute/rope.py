"""Rotary positions (arXiv 2104.09864; in two dimensions 2403.13298): pairs of a head's channels are
turned by angles that depend on a token's place, so that a query and a key meet by their distance.

Channels i and i + C/2 are a pair. Where the published code pairs 2i and 2i + 1, or has columns before
rows, its channels are reordered when weights are read: a product of queries and keys does not see it.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Cosines and sines of angles, as `turn` takes them.
Angles = tuple[jax.Array, jax.Array]


def turn(x: jax.Array, cosines: jax.Array, sines: jax.Array) -> jax.Array:
    """Queries or keys, turned by their tokens' angles.

    Args:
      x: (B, N, H, C).
      cosines, sines: of the angles, (N, 1, C/2) or (N, H, C/2) float32, or with a leading axis for images.

    Returns:
      As x, computed in float32.
    """
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cosines - b * sines, b * cosines + a * sines], axis=-1)
    return turned.astype(x.dtype)


def axial_angles(
    grid: tuple[int, int],
    size: int,
    *,
    theta: float,
    offset: float = 0.0,
    trained_grid: tuple[int, int] | None = None,
) -> np.ndarray:
    """Angles by integer rows and columns (EVA-02, arXiv 2303.11331; timm `Eva`; ViT-5).

    Args:
      grid: rows and columns of the patches.
      size: C, channels of a head.
      theta: frequencies are theta^(-k / (C/4)).
      offset: what is added to rows and columns.
      trained_grid: whose places are spread over `grid`; by default each grid has its own.

    Returns:
      (rows * columns, C/2) float32: C/4 by the row, then C/4 by the column.
    """
    places = [np.arange(n) + offset for n in grid]
    if trained_grid:
        places = [at / n * old for at, n, old in zip(places, grid, trained_grid, strict=True)]
    return _both(places, frequencies(size, theta))


def centred_angles(grid: tuple[int, int], size: int, *, theta: float) -> np.ndarray:
    """Angles by the patches' centres, from -1 to 1 along each side whatever the grid (DINOv3,
    arXiv 2508.10104): 2π times these, divided by periods of theta^(k / (C/4)). As `axial_angles`.
    """
    places = [(np.arange(n) + 0.5) / n * 2 - 1 for n in grid]
    return _both(places, 2 * np.pi * frequencies(size, theta))


def moved(angles: jax.Array, shift: jax.Array, scale: jax.Array, *, theta: float) -> jax.Array:
    """`centred_angles` of places p as those of (p + shift) * scale.

    Args:
      angles: (…, N, C/2).
      shift, scale: (2,), of rows and of columns.
    """
    quarter = angles.shape[-1] // 2
    turns = np.tile(2 * np.pi * frequencies(4 * quarter, theta), 2).astype(np.float32)
    by_row_and_column = [jnp.repeat(x, quarter) for x in (shift, scale)]
    return (angles + by_row_and_column[0] * turns) * by_row_and_column[1]


def mixed_angles(grid: tuple[int, int], frequencies: jax.Array) -> jax.Array:
    """Angles by integer rows and columns together, with learned frequencies (RoPE-Mixed, arXiv
    2403.13298 §3.2).

    Args:
      frequencies: (2, L, H, C/2) of columns and of rows, for each layer and head.

    Returns:
      (L, rows * columns, H, C/2) float32.
    """
    y, x = (axis.reshape(-1, 1, 1) for axis in np.mgrid[: grid[0], : grid[1]].astype(np.float32))
    return turned_by(y, x, frequencies[:, :, None])


def turned_by(rows, columns, frequencies: jax.Array) -> jax.Array:
    """Angles of places by learned frequencies (2, …) of columns and of rows, to which rows and columns broadcast."""
    of_columns, of_rows = frequencies
    return columns * of_columns + rows * of_rows


def frequencies(size: int, theta: float) -> np.ndarray:
    """theta^(-k / (C/4)) for heads of C = `size` channels, (C/4,) float64."""
    return theta ** (-np.arange(size // 4) / (size // 4))


def _both(places, frequencies):
    y, x = (np.outer(axis, frequencies) for axis in places)
    shape = (len(y), len(x), len(frequencies))
    both = [np.broadcast_to(y[:, None], shape), np.broadcast_to(x[None], shape)]
    return np.concatenate(both, axis=-1).reshape(-1, 2 * len(frequencies)).astype(np.float32)
