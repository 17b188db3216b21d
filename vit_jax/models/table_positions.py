"""Kinds of positions whose table is made of other parameters, a vector for every column and every row, or a function of
the centre of a patch; and kinds with a fixed table that a checkpoint has, and that may be trained later.

  learned2d    vectors of half the width for every column (X) and every row (Y), one after the other.
  factorized   vectors of the whole width for every column and every row, added up (NaViT, 2307.06304 §2.1).
  coordinates  made of the coordinates of a patch's centre, by learned frequencies and an MLP.
  fixed2d      sines and cosines of column and row as MAE has them, in which learned tokens have zeros.
  sinusoid     sines and cosines of the row number in the table: T2T's.

The paper says nothing about how they begin: all that is learned begins as the 1-D table of the official code, normal
with 0.02. At another resolution, tables of columns and rows are interpolated along their axis, which is what would
become of the 2-D table that they make together.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import draw_position, interpolate, sincos_2d, sinusoids
from vit_jax.models.grid_positions import Learned, check_sincos_width
from vit_jax.models.layers import Mlp
from vit_jax.models.positions import ComputedPosition, Fit, Variables, patches_of


class Learned2d(Learned):
    """A table of a vector of half the width for every column, and one for every row."""

    summed = False

    def check(self) -> None:
        _check_even(self)

    def variables(self, rngs: nnx.Rngs) -> nnx.Module:
        return ColumnsAndRows(self.config, rngs, summed=self.summed)

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        return variables().astype(dtype)

    def as_learned(self, params: Any) -> np.ndarray:
        return np.asarray(self.table(self.with_arrays(params), jnp.dtype("float32")))

    def fit(self, part: str, target: classifier.ClassifierConfig, resize: str) -> Fit | None:
        if part == "position/tokens" or self.config.grid == target.grid:
            return None
        axis = 1 if part == "position/x" else 0
        old, new = ((1, config.grid[axis]) for config in (self.config, target))
        return resize, lambda x: interpolate(x, new, method=resize, old_grid=old)


class Factorized(Learned2d):
    """The same with vectors of the whole width, which are added up."""

    summed = True

    def check(self) -> None:
        """Any width will do."""


class Coordinates(Learned2d):
    """A learned function of where the centre of a patch is: no parameter depends on the grid."""

    def variables(self, rngs: nnx.Rngs) -> nnx.Module:
        return OfCentres(self.config, rngs)

    def at(self, variables: Variables, table: jax.Array, native: PatchBatch) -> jax.Array:
        return ComputedPosition.at(self, variables, table, native)

    def values(self, variables: Variables, rows, columns, height, width) -> jax.Array:
        """The positions of patches in these rows and columns, as of `ComputedPosition`."""
        return variables.at(rows, columns, height, width)

    def fit(self, part: str, target: classifier.ClassifierConfig, resize: str) -> Fit | None:
        return None


class Fixed2d(Learned):
    """Sines and cosines in a table of the checkpoint."""

    is_fixed = True

    def check(self) -> None:
        check_sincos_width(self)

    def variables(self, rngs: nnx.Rngs) -> nnx.Variable:
        width = self.config.width
        table = sincos_2d(self.config.grid, width, periods=width // 4)
        return nnx.Variable(jnp.pad(table, [(0, 0), (self.config.prefix, 0), (0, 0)]))


class Sinusoid(Learned):
    """Sines and cosines of the row number in a table of the checkpoint."""

    is_fixed = True

    def variables(self, rngs: nnx.Rngs) -> nnx.Variable:
        rows = self.config.prefix + patches_of(self.config)
        return nnx.Variable(jnp.asarray(sinusoids(rows, self.config.width)))


def _check_even(position: Learned2d) -> None:
    if position.config.width % 2:
        raise ConfigError(
            f"position {position.name} needs an even model width, not {position.config.width}"
        )


class ColumnsAndRows(nnx.Module):
    """Tables `x` (1, columns, D/2) and `y` (1, rows, D/2), of `factorized` both of D, and whole vectors `tokens`
    (1, prefix, D) of learned tokens.
    """

    def __init__(self, config: classifier.ClassifierConfig, rngs: nnx.Rngs, *, summed: bool):
        rows, columns = config.grid
        self.summed = summed
        width = config.width if summed else config.width // 2
        self.x = draw_position((1, columns, width), rngs)
        self.y = draw_position((1, rows, width), rngs)
        if config.prefix:
            self.tokens = draw_position((1, config.prefix, config.width), rngs)

    def __call__(self) -> jax.Array:
        """(1, prefix + N, D), as a table of 1-D positions."""
        tokens = self.tokens[...] if hasattr(self, "tokens") else None
        return joined(self.x[...], self.y[...], tokens, summed=self.summed)


def joined(x, y, tokens=None, *, summed: bool = False):
    """The table that the parameters of `ColumnsAndRows` make, arrays of JAX or NumPy."""
    grid = (y.shape[1], x.shape[1], x.shape[2])
    xp = np if isinstance(x, np.ndarray) else jnp
    both = xp.broadcast_to(x, grid), xp.broadcast_to(y[0][:, None], grid)
    patches = both[0] + both[1] if summed else xp.concatenate(both, axis=-1)
    patches = patches.reshape(1, -1, patches.shape[-1])
    return patches if tokens is None else xp.concatenate([tokens, patches], axis=1)


class OfCentres(nnx.Module):
    """Learned Fourier features of the centre (x, y) of a patch, and an MLP of one hidden layer (arXiv 2106.02795, Eq. 2
    and 3): MLP([cos W(x, y), sin W(x, y)] / √D).

    Coordinates reach from -1 to 1 over an image, of whatever size and aspect, so no parameter but `tokens` (1, prefix,
    D), of learned tokens, depends on the grid. `frequencies` W (2, D/2), for x and for y, begin normal with 2π,
    as Segment Anything has them, where they are fixed (arXiv 2304.02643, its code's `PositionEmbeddingRandom`). As many
    features and hidden channels as the model is wide are our choice.
    """

    def __init__(self, config: classifier.ClassifierConfig, rngs: nnx.Rngs):
        self.grid, width = tuple(config.grid), config.width
        normal = nnx.initializers.normal(2 * np.pi)
        self.frequencies = nnx.Param(normal(rngs.params(), (2, width // 2)))
        self.mlp = Mlp(width, width, activation="gelu", dropout=0.0, dtype=jnp.float32, rngs=rngs)
        if config.prefix:
            self.tokens = draw_position((1, config.prefix, width), rngs)

    def __call__(self) -> jax.Array:
        """(1, prefix + N, D), as a table of 1-D positions."""
        rows, columns = self.grid
        patches = self.at(*np.divmod(np.arange(rows * columns), columns), rows, columns)[None]
        if not hasattr(self, "tokens"):
            return patches
        return jnp.concatenate([self.tokens[...], patches], axis=1)

    def at(self, row, column, rows, columns) -> jax.Array:
        """The positions (…, N, D) float32 of patches (…, N) of a grid of `rows` × `columns`."""
        y, x = (
            2 * (jnp.asarray(place, jnp.float32) + 0.5) / size - 1
            for place, size in ((row, rows), (column, columns))
        )
        of_x, of_y = self.frequencies[...]
        angles = x[..., None] * of_x + y[..., None] * of_y
        features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], -1)
        return self.mlp(features / np.sqrt(features.shape[-1]).astype(np.float32))
