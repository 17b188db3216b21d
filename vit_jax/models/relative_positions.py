"""Kinds of positions that act in attention: their tables, and how these go to another resolution. What attention
computes with them is in `compute/relative`.

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

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.compute import relative
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.embeddings import draw_position, interpolate
from vit_jax.models.positions import Fit, Position, Variables, patches_of

OTHERS = 3  # numbers of a bias for tokens that are no patches: from one, to one, and between two


class InLogits(Position):
    """Positions that attention adds to its logits. Their parameters are a table of a layer, or of all."""

    usual_place = "layers"
    shown_by = "distances"
    acts_in_logits = True

    def shape(self) -> tuple[int, ...]:
        """The shape of the table."""
        raise NotImplementedError

    def variables(self, rngs: nnx.Rngs) -> nnx.Variable:
        return draw_position(self.shape(), rngs)

    def of_layer(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        """The table itself."""
        return variables[...]

    def fit(self, part: str, target: ClassifierConfig, resize: str) -> Fit | None:
        old, new = self.config.grid, target.grid
        if old == new:
            return None
        return resize, lambda x: self.interpolated(x, old, new, resize)

    def interpolated(
        self, table: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str
    ) -> np.ndarray:
        """The table of another grid."""
        return interpolate_distances(table, old, new, method=method)


class Relative(InLogits):
    """An embedding for every distance p_q - p_k of two patches' places in the row of all patches, as a further key;
    queries meet it as they do keys: q·(k + e) / √C.
    """

    logit_products = 1

    def shape(self) -> tuple[int, ...]:
        return _distances_of(self.config), self.config.width // self.config.heads

    def in_logits(self, values: jax.Array):
        return jax.tree_util.Partial(relative.logits, values)


class Bias2d(InLogits):
    """Relative position bias (BEiT, 2106.08254): for every distance down and across, and every head, a number; three
    more to, from and among tokens that are no patches.
    """

    shown_by = "biases"

    def shape(self) -> tuple[int, ...]:
        others = OTHERS if self.config.tokens > patches_of(self.config) else 0
        return math.prod(2 * side - 1 for side in self.config.grid) + others, self.config.heads

    def in_logits(self, values: jax.Array):
        return relative.bias_of_grid(values, tuple(self.config.grid))

    def interpolated(
        self, table: np.ndarray, old: tuple[int, int], new: tuple[int, int], method: str
    ) -> np.ndarray:
        return interpolate_bias(table, old, new, method=method)


class TransformerXL(InLogits):
    """The terms of Transformer-XL for distances in the row of patches, see `zoo/relative_terms`."""

    shown_by = ""
    logit_products = 1

    def shape(self) -> tuple[int, ...]:
        return 2, self.config.heads, self.config.width // self.config.heads

    def in_logits(self, values: jax.Array):
        return relative.distance_sinusoids(patches_of(self.config), self.config.width), values

    def fit(self, part: str, target: ClassifierConfig, resize: str) -> Fit | None:
        """No vector is of a distance."""
        return None


class Deberta(InLogits):
    """The terms of DeBERTa for distances in the row of patches, see `zoo/relative_terms`."""

    usual_place = "shared"
    logit_products = 2

    def shape(self) -> tuple[int, ...]:
        return _distances_of(self.config), self.config.width

    def in_logits(self, values: jax.Array):
        return values


def _distances_of(config: ClassifierConfig) -> int:
    return 2 * patches_of(config) - 1


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
