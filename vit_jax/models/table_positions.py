"""Tables of positions that are made of other parameters, `learned2d`, `factorized` and `coordinates` of `positions`:
a vector for every column and every row, or a function of where the centre of a patch is.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import classifier
from vit_jax.models.embeddings import draw_position
from vit_jax.models.layers import Mlp


def make(config: classifier.ClassifierConfig, rngs: nnx.Rngs) -> nnx.Module:
    """The positions of one place; called, they give their table. `config` is that of `vit_zoo`, here and below."""
    kind = CoordinatePositions if config.position == "coordinates" else Learned2d
    return kind(config, rngs)


def table_of(config: classifier.ClassifierConfig, params: dict) -> np.ndarray:
    """(1, prefix + N, D), the table that the parameters of one place make."""
    module = nnx.eval_shape(lambda: make(config, nnx.Rngs(0)))
    return np.asarray(nnx.merge(nnx.split(module)[0], params)())


class Learned2d(nnx.Module):
    """Tables `x` (1, columns, D/2) and `y` (1, rows, D/2), of `factorized` both of D, and whole vectors `tokens`
    (1, prefix, D) of learned tokens.
    """

    def __init__(self, config: classifier.ClassifierConfig, rngs: nnx.Rngs):
        (rows, columns), self.summed = config.grid, config.position == "factorized"
        width = config.width if self.summed else config.width // 2
        self.x = draw_position((1, columns, width), rngs)
        self.y = draw_position((1, rows, width), rngs)
        if config.prefix:
            self.tokens = draw_position((1, config.prefix, config.width), rngs)

    def __call__(self) -> jax.Array:
        """(1, prefix + N, D), as a table of 1-D positions."""
        tokens = self.tokens[...] if hasattr(self, "tokens") else None
        return joined(self.x[...], self.y[...], tokens, summed=self.summed)


def joined(x, y, tokens=None, *, summed: bool = False):
    """The table that the parameters of `Learned2d` make, arrays of JAX or NumPy."""
    grid = (y.shape[1], x.shape[1], x.shape[2])
    xp = np if isinstance(x, np.ndarray) else jnp
    both = xp.broadcast_to(x, grid), xp.broadcast_to(y[0][:, None], grid)
    patches = both[0] + both[1] if summed else xp.concatenate(both, axis=-1)
    patches = patches.reshape(1, -1, patches.shape[-1])
    return patches if tokens is None else xp.concatenate([tokens, patches], axis=1)


class CoordinatePositions(nnx.Module):
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
