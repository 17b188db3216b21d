"""The positions of the paper's ViT: a learned vector for every patch, or fixed sines and cosines of column and row."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.base.errors import ConfigError
from vit_jax.models import classifier
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import draw_position, sines, spread_sincos_2d
from vit_jax.models.positions import ComputedPosition, Fit, Position, Variables, patches_of


class Learned(Position):
    """1-D: a vector for every patch, row by row of the image. It begins normal with 0.02."""

    has_prefix = True

    def variables(self, rngs: nnx.Rngs) -> nnx.Variable:
        rows = self.config.prefix + patches_of(self.config)
        return draw_position((1, rows, self.config.width), rngs)

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        return variables[...].astype(dtype)

    def at(self, variables: Variables, table: jax.Array, native: PatchBatch) -> jax.Array:
        from vit_jax.models import native_sizes

        return native_sizes.resized_table(table, native, self.config)

    def as_learned(self, params: Any) -> np.ndarray:
        return np.asarray(params)

    def fit(self, part: str, target: classifier.ClassifierConfig, resize: str) -> Fit | None:
        return classifier.fit_positions(self.config, target, resize)


class Sincos2d(ComputedPosition):
    """Fixed sines and cosines of column and row, see `embeddings.sincos_2d`."""

    def check(self) -> None:
        check_sincos_width(self)

    def values(self, variables: Variables, rows, columns, height, width) -> jax.Array:
        periods = self.config.width // 4
        omega = 10_000.0 ** (-np.arange(periods) / (periods - 1))
        return sines(rows, columns, omega.astype(np.float32))

    def table(
        self, variables: Variables, dtype: jnp.dtype, spread: tuple[int, int] | None = None
    ) -> jax.Array:
        # Computed in float64. Another grid is interpolated, as a learned table would be.
        return jnp.asarray(spread_sincos_2d(self.config.grid, self.config.width, spread), dtype)


def check_sincos_width(position: Position) -> None:
    """Raises `ConfigError` for a width that four kinds of waves cannot share."""
    width = position.config.width
    if width % 4 or width < 8:
        raise ConfigError(
            f"position {position.name} needs a model width of 8 or more that 4 divides, not {width}"
        )
