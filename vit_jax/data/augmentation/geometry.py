"""Shears, shifts and rotations of batches of images without a gather, which is slow on TPUs.

Everything is made of one move: each row shifted by an amount of its own, by rotating it by the
powers of two that make up the amount: log2(W) selections. A rotation is three shears. The
operations that use this, and their strengths, are in `randaugment.py` and `timm_augment.py`.
"""

from collections.abc import Callable

import flax
import jax
import jax.numpy as jnp
from jax import lax

# (images, offset, fill, layout) -> images: `nearest` or `timm_augment.cubic`.
Move = Callable[..., jax.Array]
Fill = jax.Array | int


@flax.struct.dataclass
class WholeImages:
    """Where pixels are in images (B, H, W, C), and what depends on it.

    `patch_layout.PatchLayout` is another such layout, and explains the methods.
    """

    inside = None  # which pixels count, (B, 1, W, 1); here all

    def sides(self, images):
        return images.shape[1:3]

    def places(self, images):
        return jnp.arange(images.shape[1])[:, None], jnp.arange(images.shape[2])

    def transposed(self, images):
        return images.swapaxes(1, 2), self

    def turn_rows(self, images, amount):
        return _turn_rows(images, amount)

    def cubic_taps(self, images, whole, weights):
        # Two more pixels either side, so that the four a place needs are there without wrapping.
        padded = jnp.pad(images, ((0, 0), (0, 0), (2, 2), (0, 0)), mode="edge")
        turned = _turn_rows(padded, whole.astype(jnp.int32) + 1).astype(jnp.float32)
        return sum(w * turned[:, :, tap : tap + images.shape[2]] for tap, w in enumerate(weights))

    def box_sums(self, values):
        across = values[:, :, :-2] + values[:, :, 1:-1] + values[:, :, 2:]
        inner = across[:, :-2] + across[:, 1:-1] + across[:, 2:]
        return jnp.pad(inner, ((0, 0), (1, 1), (1, 1), (0, 0)))

    def rotate(self, images, degrees, fill, move):
        return rotate(images, degrees, fill, move, self)

    def half_turned(self, images):
        return images[:, ::-1, ::-1]

    def widened(self, images, fill):
        batch, height, _, channels = images.shape
        room = (batch, height, height // 2 + 1, channels)  # tan(45°) of half the height
        room = jnp.broadcast_to(jnp.asarray(fill, images.dtype), room)
        return jnp.concatenate([room, images, room], axis=2), self

    def narrowed(self, canvas):
        room = canvas.shape[1] // 2 + 1
        return canvas[:, :, room:-room]


WHOLE = WholeImages()


def nearest(images: jax.Array, offset: jax.Array, fill: Fill, layout=WHOLE) -> jax.Array:
    """Pixel (y, x) of the result is the image's at (y, x + offset), rounded to the nearest pixel, halves up.

    Args:
      images: (B, H, W, C) of any type.
      offset: float32, of each row, in pixels: (B, H, 1), (B, 1, 1), or (B, H, W) equal along a row.
      fill: one number, or (C,): what is left where there is no image.
      layout: where pixels are.
    """
    offset = jnp.floor(offset + 0.5).astype(jnp.int32)
    source = layout.places(images)[1] + offset
    inside = (source >= 0) & (source < layout.sides(images)[1])
    moved = layout.turn_rows(images, offset)
    return jnp.where(inside[..., None], moved, jnp.asarray(fill, images.dtype))


def with_columns(function: Callable) -> Callable:
    """A function of images and more, the last of it the layout, with columns in place of rows."""

    def apply(images, *args, layout=WHOLE):
        turned, other = layout.transposed(images)
        return other.transposed(function(turned, *args, layout=other))[0]

    return apply


def rotate(
    images: jax.Array, degrees: jax.Array, fill: Fill, move: Move, layout=WHOLE
) -> jax.Array:
    """Turns each image (B, H, W, C) about its centre, counter-clockwise, by its `degrees` (B,).

    By three shears, along rows, columns and rows (Paeth, "A fast algorithm for general raster rotation", 1986), on a
    canvas wide enough that nothing is lost between them. With `nearest` no pixel within is lost or doubled, and each
    comes from at most one pixel beside where it should in x and in y.
    """
    half_turns = jnp.round(degrees / 180)
    odd = half_turns % 2 == 1
    images = jnp.where(odd[:, None, None, None], layout.half_turned(images), images)
    angle = jnp.radians(degrees - 180 * half_turns)[:, None, None]  # in [-90, 90] degrees

    def sheared(images, slope, layout):
        y = layout.places(images)[0] - (layout.sides(images)[0] - 1) / 2
        return move(images, slope * y, fill, layout=layout)

    canvas, wide = layout.widened(images, fill)
    canvas = sheared(canvas, -jnp.tan(angle / 2), layout=wide)
    canvas = with_columns(sheared)(canvas, jnp.sin(angle), layout=wide)
    return layout.narrowed(sheared(canvas, -jnp.tan(angle / 2), layout=wide))


def _turn_rows(images: jax.Array, amount: jax.Array) -> jax.Array:
    """Pixel (y, x) of the result is pixel (y, (x + amount) mod W); `amount`: (B, H, 1) or (B, 1, 1) int32."""
    width = images.shape[2]
    amount = amount % width

    def turn(bit, images):
        twice = jnp.concatenate([images, images], axis=2)
        turned = lax.dynamic_slice_in_dim(twice, 1 << bit, width, axis=2)
        return jnp.where(((amount >> bit) & 1 == 1)[..., None], turned, images)

    # A loop, because XLA would fuse the selections and compute each again for every later one.
    return lax.fori_loop(0, (width - 1).bit_length(), turn, images)
