"""Where pixels are in images at sizes of their own, for operations that depend on it (RandAugment, AutoAugment).

A patch is a token; side by side, the tokens of a batch are a strip, (B, P, N · P, C): the rows of patches of an image,
one after the other. What happens along a row of pixels is then a shift of the strip, each pixel by its own amount.
Columns become rows by a gather of whole tokens. Formulas and magnitudes are the same as for whole images.
"""

import math

import flax
import jax
import jax.numpy as jnp
from jax import lax

from vit_jax.data.augmentation import geometry


@flax.struct.dataclass
class PatchLayout:
    """The layout of a strip. Of whole images `geometry.WholeImages` has the same methods.

    Attributes:
      grids: (B, 2) int32, rows and columns of each image, in patches.
      side: of a patch, in pixels.
      tokens: N, of the longest image.
      reach: no pixel moves further than this within its image.
    """

    grids: jax.Array
    side: int = flax.struct.field(pytree_node=False)
    tokens: int = flax.struct.field(pytree_node=False)
    reach: int = flax.struct.field(pytree_node=False)

    @classmethod
    def of(cls, grids: jax.Array, side: int, tokens: int) -> "PatchLayout":
        """The layout of images whose longest has N = `tokens` patches."""
        return cls(grids, side, tokens, tokens * side)

    @property
    def inside(self) -> jax.Array:
        """(B, 1, N · P, 1) bool: what is no padding."""
        inside = jnp.arange(self.tokens) < self.grids.prod(1)[:, None]
        return jnp.repeat(inside, self.side, axis=1)[:, None, :, None]

    def sides(self, images):
        """Height and width, (B, 1, 1) int32."""
        return tuple(self.side * self.grids[:, axis, None, None] for axis in (0, 1))

    def places(self, images):
        """y (B, P, N · P) and x (B, 1, N · P), int32."""
        columns, pixels = self.grids[:, 1:], jnp.arange(self.side)
        row, column = jnp.divmod(jnp.arange(self.tokens)[None], columns)
        y = jnp.repeat(row * self.side, self.side, axis=1)[:, None] + pixels[:, None]
        x = column[..., None] * self.side + pixels
        return y, x.reshape(len(x), 1, -1)

    def transposed(self, images):
        """Images with rows in place of columns, and their layout."""
        rows, columns = self.grids[:, :1], self.grids[:, 1:]
        row, column = jnp.divmod(jnp.arange(self.tokens)[None], rows)  # of the result: `rows` long
        moved = self._gathered(images, column * columns + row)
        moved = moved.reshape(*moved.shape[:2], self.tokens, self.side, -1).swapaxes(1, 3)
        return moved.reshape(images.shape), self.replace(grids=self.grids[:, ::-1])

    def turn_rows(self, images, amount):
        """Pixel (y, x) of the result is pixel (y, x + amount) of its image, or any where it has none; int32."""
        back, distance = amount < 0, jnp.abs(amount)

        def turn(bit, images):
            # Between a pixel and its source lie only pixels of the same row, that move as far.
            step = 1 << bit
            chosen = (distance >> bit) & 1 == 1
            images = jnp.where((chosen & ~back)[..., None], jnp.roll(images, -step, axis=2), images)
            return jnp.where((chosen & back)[..., None], jnp.roll(images, step, axis=2), images)

        return lax.fori_loop(0, (self.reach - 1).bit_length(), turn, images)

    def cubic_taps(self, images, whole, weights):
        """(B, P, N · P, C) float32: the sum of pixels x + whole - 1 to x + whole + 2, weighted; edges continue."""
        next_two = self._beside(images, 1), self._beside(images, 2)
        taps = self._beside(images, -1), images, *next_two
        between = sum(w * tap.astype(jnp.float32) for w, tap in zip(weights, taps, strict=True))
        # Half a pixel before the first, sources are x = -1 and on: 0, 0, 0 and 1.
        first = self._first(jnp.concatenate([images, next_two[0]], axis=-1))
        edge, second = jnp.split(first.astype(jnp.float32), 2, axis=-1)
        before = sum(w * tap for w, tap in zip(weights, (edge, edge, edge, second), strict=True))
        source = self.places(images)[1] + whole.astype(jnp.int32)
        moved = self.turn_rows(between, whole.astype(jnp.int32))
        return jnp.where((source < 0)[..., None], before, moved)

    def box_sums(self, values):
        """The sum of each pixel and its eight neighbours; of borders anything."""
        across = jnp.roll(values, 1, axis=2) + values + jnp.roll(values, -1, axis=2)
        columns, index = self.grids[:, 1:], jnp.arange(self.tokens)[None]
        above = self._gathered(across[:, -1:], index - columns)
        below = self._gathered(across[:, :1], index + columns)
        rows = jnp.concatenate([above, across, below], axis=1)
        return rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:]

    def rotate(self, images, degrees, fill, move):
        """`geometry.rotate`; of an image that is higher than wide by way of its columns, so that it needs less room."""
        tall = (self.grids[:, 0] > self.grids[:, 1])[:, None]
        turned, other = self.transposed(images)
        flat = self.replace(
            grids=jnp.where(tall, other.grids, self.grids),
            reach=min(self.reach, (math.isqrt(self.tokens) + 1) * self.side),
        )
        tall = tall[..., None, None]
        degrees = jnp.where(tall[:, 0, 0, 0], -degrees, degrees)
        images = geometry.rotate(jnp.where(tall, turned, images), degrees, fill, move, flat)
        return jnp.where(tall, flat.transposed(images)[0], images)

    def half_turned(self, images):
        """Images turned by 180 degrees."""
        index = self.grids.prod(1, keepdims=True) - 1 - jnp.arange(self.tokens)
        moved = self._gathered(images[:, ::-1], index)
        moved = moved.reshape(*moved.shape[:2], self.tokens, self.side, -1)
        return moved[:, :, :, ::-1].reshape(images.shape)

    def widened(self, images, fill):
        """Images, no higher than wide, with `fill` either side, as much as `rotate` needs; and their layout."""
        rows, columns = self.grids[:, :1], self.grids[:, 1:]
        room = self._room()
        # Height times width and twice the room: of rows * columns <= N patches, no more rows than columns.
        wide = self.replace(
            grids=jnp.concatenate([rows, columns + 2 * room], axis=1),
            tokens=2 * self.tokens + 2 * math.isqrt(self.tokens),
        )
        row, column = jnp.divmod(jnp.arange(wide.tokens)[None], wide.grids[:, 1:])
        column = column - room
        moved = self._gathered(images, row * columns + column)
        within = jnp.repeat((column >= 0) & (column < columns), self.side, axis=1)
        fill = jnp.asarray(fill, images.dtype)
        return jnp.where(within[:, None, :, None], moved, fill), wide

    def narrowed(self, canvas):
        """The images in the middle of what `widened` made of them."""
        columns, room = self.grids[:, 1:], self._room()
        row, column = jnp.divmod(jnp.arange(self.tokens)[None], columns)
        return self._gathered(canvas, row * (columns + 2 * room) + room + column)

    def _room(self) -> jax.Array:
        """(B, 1) patches either side of which a rotation has need: tan(45°) of half the height."""
        height = self.side * self.grids[:, :1]
        return -(-(height // 2 + 1) // self.side)

    def _gathered(self, images, index):
        """Tokens by their `index` (B, M), of strips of any height; beyond the strip, its ends."""
        tokens = images.reshape(*images.shape[:2], -1, self.side, images.shape[-1])
        index = jnp.clip(index, 0, tokens.shape[2] - 1)[:, None, :, None, None]
        moved = jnp.take_along_axis(tokens, index, axis=2)
        return moved.reshape(*images.shape[:2], -1, images.shape[-1])

    def _first(self, images):
        """Each row's first pixel, in place of all its pixels."""
        columns, index = self.grids[:, 1:], jnp.arange(self.tokens)[None]
        moved = self._gathered(images, index // columns * columns)
        return jnp.repeat(moved[:, :, :: self.side], self.side, axis=2)

    def _beside(self, images, step: int):
        """Pixels x + `step` in place of x, one at a time: at the end of a row its last."""
        x, width = self.places(images)[1], self.sides(images)[1]
        for _ in range(abs(step)):
            source = x + (1 if step > 0 else -1)
            within = (source >= 0) & (source < width)
            moved = jnp.roll(images, -1 if step > 0 else 1, axis=2)
            images = jnp.where(within[..., None], moved, images)
        return images


def strip(patches: jax.Array, side: int, channels: int) -> jax.Array:
    """Patches (B, N, P · P · C) as a strip (B, P, N · P, C)."""
    count, tokens, _ = patches.shape
    pixels = patches.reshape(count, tokens, side, side, channels).swapaxes(1, 2)
    return pixels.reshape(count, side, tokens * side, channels)


def patches_of(images: jax.Array) -> jax.Array:
    """The patches (B, N, P · P · C) of a strip."""
    count, side, _, channels = images.shape
    pixels = images.reshape(count, side, -1, side, channels).swapaxes(1, 2)
    return pixels.reshape(count, -1, side * side * channels)
