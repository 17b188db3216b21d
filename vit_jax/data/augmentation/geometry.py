"""Shears, shifts and rotations of batches of images without a gather, which is slow on TPUs.

Everything is made of one move: each row shifted by an amount of its own, by rotating it by the
powers of two that make up the amount: log2(W) selections. A rotation is three shears. The
operations that use this, and their strengths, are in `randaugment.py` and `timm_augment.py`.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# (images, offset, fill) -> images: `nearest` or `cubic`.
Move = Callable[[jax.Array, jax.Array, "jax.Array | int"], jax.Array]


def nearest(images: jax.Array, offset: jax.Array, fill: jax.Array | int) -> jax.Array:
    """Pixel (y, x) of the result is the image's at (y, x + offset[y]), rounded to the nearest
    pixel, halves up.

    Args:
      images: (B, H, W, C) of any type.
      offset: (B, H), or (B, 1) for all rows alike, float32, in pixels.
      fill: one number, or (C,): what is left where there is no image.
    """
    offset = jnp.floor(offset + 0.5).astype(jnp.int32)
    source = jnp.arange(images.shape[2]) + offset[..., None]
    inside = (source >= 0) & (source < images.shape[2])
    return jnp.where(inside[..., None], _turn_rows(images, offset), jnp.asarray(fill, images.dtype))


def cubic(images: jax.Array, offset: jax.Array, fill: jax.Array | int) -> jax.Array:
    """As `nearest`, but between pixels a cubic convolution with a = -1, which is Pillow's BICUBIC
    of affine transforms.

    Beyond the border the outermost pixel continues for half a pixel; then comes `fill`.

    Returns:
      (B, H, W, C) float32, neither rounded nor clipped.
    """
    width = images.shape[2]
    whole = jnp.floor(offset)
    d = (offset - whole)[..., None, None]
    # Two more pixels either side, so that the four a place needs are there without wrapping.
    padded = jnp.pad(images, ((0, 0), (0, 0), (2, 2), (0, 0)), mode="edge")
    turned = _turn_rows(padded, whole.astype(jnp.int32) + 1).astype(jnp.float32)
    weights = (-d + 2 * d**2 - d**3, 1 - 2 * d**2 + d**3, d + d**2 - d**3, -(d**2) + d**3)
    values = sum(w * turned[:, :, tap : tap + width] for tap, w in enumerate(weights))
    source = jnp.arange(width) + offset[..., None]
    inside = (source >= -0.5) & (source < width - 0.5)
    return jnp.where(inside[..., None], values, jnp.asarray(fill, jnp.float32))


def move_columns(images: jax.Array, offset: jax.Array, fill: jax.Array | int, move: Move):
    """`move` with columns in place of rows: (B, W) or (B, 1) offsets."""
    return move(images.swapaxes(1, 2), offset, fill).swapaxes(1, 2)


def rotate(images: jax.Array, degrees: jax.Array, fill: jax.Array | int, move: Move) -> jax.Array:
    """Turns each image (B, H, W, C) about its centre, counter-clockwise, by its `degrees` (B,).

    By three shears, along rows, columns and rows (Paeth, "A fast algorithm for general raster
    rotation", 1986), on a canvas wide enough that nothing is lost between them. With `nearest` no
    pixel within is lost or doubled, and each comes from at most one pixel beside where it should in
    x and in y.
    """
    batch, height, width, channels = images.shape
    half_turns = jnp.round(degrees / 180)
    odd = half_turns % 2 == 1
    images = jnp.where(odd[:, None, None, None], images[:, ::-1, ::-1], images)
    angle = jnp.radians(degrees - 180 * half_turns)[:, None]  # in [-90, 90] degrees
    along_rows, along_columns = -jnp.tan(angle / 2), jnp.sin(angle)

    room = height // 2 + 1  # tan(45°) of half the height
    border = jnp.broadcast_to(jnp.asarray(fill, images.dtype), (batch, height, room, channels))
    y = jnp.arange(height) - (height - 1) / 2
    x = jnp.arange(width + 2 * room) - (width + 2 * room - 1) / 2
    canvas = jnp.concatenate([border, images, border], axis=2)
    canvas = move(canvas, along_rows * y, fill)
    canvas = move_columns(canvas, along_columns * x, fill, move)
    return move(canvas, along_rows * y, fill)[:, :, room:-room]


def _turn_rows(images: jax.Array, amount: jax.Array) -> jax.Array:
    """Pixel (y, x) of the result is pixel (y, (x + amount[y]) mod W); `amount`: (B, H) or (B, 1)
    int32.
    """
    width = images.shape[2]
    amount = amount % width

    def turn(bit, images):
        twice = jnp.concatenate([images, images], axis=2)
        turned = lax.dynamic_slice_in_dim(twice, 1 << bit, width, axis=2)
        return jnp.where(((amount >> bit) & 1 == 1)[..., None, None], turned, images)

    # A loop, because XLA would fuse the selections and compute each again for every later one.
    return lax.fori_loop(0, (width - 1).bit_length(), turn, images)
