"""Tables of the positions that act in attention, `IN_LOGITS` of `positions`: their shapes, and how they go to another
resolution. What attention computes with them is in `compute/relative`.

An embedding of a 1-D distance has the size of a head, and all heads of a layer share it (1803.02155 §3.4), or that of
a token (`deberta`); tokens that are no patches have no distance. `transformer_xl` has two vectors for each head, and
none for a distance. A table of 1-D distances is one of distances down and across, in which those share a
row that are as far apart in the row of all patches: so spread out, it is interpolated as a table of (2h - 1, 2w - 1)
places, and each new distance takes the mean over the pairs of patches that are so far apart.

A table of `bias2d` has its numbers row by row, of the distances down and in each those across, as BEiT's authors and
timm have them, and is interpolated as that table; the three numbers of other tokens stay. (transformers reads a table
that is not square as one of columns before rows, which mixes its numbers up; and timm places what is interpolated in a
geometric progression.)
"""

import math
from collections.abc import Callable

import numpy as np

from vit_jax.models import classifier
from vit_jax.models.embeddings import interpolate

OTHERS = 3  # numbers of a bias for tokens that are no patches: from one, to one, and between two


def table_shape(config: classifier.ClassifierConfig) -> tuple[int, ...]:
    """The shape of a layer's table; `config` is that of `vit_zoo`, here and below."""
    distances, head_size = 2 * math.prod(config.grid) - 1, config.width // config.heads
    match config.position:
        case "relative":
            return distances, head_size
        case "deberta":
            return distances, config.width
        case "transformer_xl":
            return 2, config.heads, head_size
    others = OTHERS if config.tokens > math.prod(config.grid) else 0
    return math.prod(2 * side - 1 for side in config.grid) + others, config.heads


def resizing(
    source: classifier.ClassifierConfig, target: classifier.ClassifierConfig, method: str
) -> tuple[str, Callable[[np.ndarray], np.ndarray]] | None:
    """`method`, and what makes the target's table of a layer of the source's; `None` for the same."""
    if source.position == "transformer_xl":
        return None
    function = interpolate_bias if source.position == "bias2d" else interpolate_distances
    return method, lambda x: function(x, source.grid, target.grid, method=method)


def interpolate_bias(
    table: np.ndarray, old_grid: tuple[int, int], new_grid: tuple[int, int], *, method: str
) -> np.ndarray:
    """A table of `bias2d` for another resolution.

    Args:
      table: ((2h - 1)(2w - 1) + others, heads), of the patches of `old_grid`, rows and columns.
      new_grid: rows and columns of the new patches.
      method: see `embeddings.interpolate`.

    Returns:
      The table of the new grid in the dtype of `table`.
    """
    old, new = (tuple(2 * side - 1 for side in grid) for grid in (old_grid, new_grid))
    count = math.prod(old)
    spread = interpolate(table[None, :count], new, method=method, old_grid=old)[0]
    return np.concatenate([spread.astype(table.dtype), table[count:]])


def interpolate_distances(
    table: np.ndarray, old_grid: tuple[int, int], new_grid: tuple[int, int], *, method: str
) -> np.ndarray:
    """Embeddings of distances for another resolution, see above.

    Args:
      table: (2N - 1, C), of the patches of `old_grid`, rows and columns.
      new_grid: with N' patches.
      method: see `embeddings.interpolate`.

    Returns:
      (2N' - 1, C) in the dtype of `table`.
    """
    spread = table[_distances(old_grid)].reshape(1, -1, table.shape[1])
    old, new = ([2 * side - 1 for side in grid] for grid in (old_grid, new_grid))
    spread = interpolate(spread, tuple(new), method=method, old_grid=tuple(old))[0]
    rows, columns = (side - np.abs(np.arange(1 - side, side)) for side in new_grid)
    pairs = np.outer(rows, columns).reshape(-1, 1)  # so many patches are that far apart
    index = _distances(new_grid).ravel()
    total = np.zeros((2, 2 * math.prod(new_grid) - 1, table.shape[1]))
    np.add.at(total[0], index, pairs * spread.astype(np.float64))
    np.add.at(total[1], index, pairs)
    return (total[0] / total[1]).astype(table.dtype)


def _distances(grid: tuple[int, int]) -> np.ndarray:
    """(2h - 1, 2w - 1): which row of a table of distances is for so many rows and columns."""
    rows, columns = grid
    down, across = np.arange(1 - rows, rows), np.arange(1 - columns, columns)
    return down[:, None] * columns + across + rows * columns - 1
