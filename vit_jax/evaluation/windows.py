"""Features of images larger than a model's: windows of the model's own size slide over an image, and where they
overlap, what they give is averaged.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.models.registry import Weights

Features = tuple[jax.Array, tuple[LayerFeatures, ...]]


def slide(
    features: Callable[[Weights, jax.Array], Features],
    window: Size,
    image_size: Size,
    stride: int,
    grids: Sequence[tuple[int, int]],
) -> Callable[[Weights, jax.Array], Features]:
    """Features of larger images, to be compiled. One window at a time is in memory, of all images of a batch.

    Args:
      features: of images of the size `window`, from `forward.make_features`.
      window: the model's image size.
      image_size: of the images that windows slide over.
      stride: pixels from one window to the next; the last one ends with the image.
      grids: rows and columns of each layer in a window.

    Returns:
      As `features`: the means over windows of what is pooled and of class tokens, and the patches of the whole image,
      each the mean over the windows that it is in. Other learned tokens are dropped.

    Raises:
      ConfigError: the image is smaller than a window, or windows would not begin at the border of a patch.
    """
    sides, whole = sizes.height_width(window), sizes.height_width(image_size)
    cells = _cells(sides, grids, sizes.size_text(window))
    starts = [
        _starts(length, side, stride, cell)
        for length, side, cell in zip(whole, sides, cells, strict=True)
    ]
    corners = np.array([(top, left) for top in starts[0] for left in starts[1]], np.int32)

    def windowed(weights: Weights, images: jax.Array) -> Features:
        def of_window(corner: jax.Array) -> Features:
            begin = (0, corner[0], corner[1], 0)
            shape = (len(images), *sides, images.shape[-1])
            return features(weights, jax.lax.dynamic_slice(images, begin, shape))

        def add(totals, corner: jax.Array):
            pooled, layers = of_window(corner)
            pairs = zip(totals[1], layers, strict=True)
            return (totals[0] + pooled, [_add(*pair, corner, sides) for pair in pairs]), None

        like_pooled, like = jax.eval_shape(of_window, corners[0])
        zeros = [_zeros(layer, whole, sides) for layer in like]
        first = jnp.zeros(like_pooled.shape, like_pooled.dtype), zeros
        (pooled, sums), _ = jax.lax.scan(add, first, corners)
        means = [_mean(*pair, corners, sides) for pair in zip(like, sums, strict=True)]
        return pooled / len(corners), tuple(means)

    return windowed


def _cells(
    sides: tuple[int, int], grids: Sequence[tuple[int, int]], window: str
) -> tuple[int, int]:
    """Height and width in pixels of the smallest part that is whole patches of every layer."""
    sides_of_cell = [1, 1]
    for grid in grids:
        for axis, (side, count) in enumerate(zip(sides, grid, strict=True)):
            if side % count:
                raise ConfigError(
                    f"a layer of {grid[0]} x {grid[1]} places does not divide windows of {window} pixels evenly, so "
                    "windows of it cannot be put together: choose another layer"
                )
            sides_of_cell[axis] = math.lcm(sides_of_cell[axis], side // count)
    return tuple(sides_of_cell)


def _starts(length: int, side: int, stride: int, cell: int) -> list[int]:
    """Where windows of a side begin along a length."""
    if length < side:
        raise ConfigError(
            f"image_size has a side of {length} pixels, smaller than the model's windows of {side}: choose {side} or "
            "more, or no stride"
        )
    if stride > side:
        raise ConfigError(
            f"stride = {stride} leaves pixels between windows of {side}: choose {side} or less"
        )
    if stride % cell or length % cell != side % cell:
        raise ConfigError(
            f"windows of {side} pixels would not begin at the border of patches: stride = {stride} must be a multiple "
            f"of {cell}, and a side of image_size, {length}, {side} and a multiple of {cell} more"
        )
    return [*range(0, length - side, stride), length - side]


def _canvas(
    grid: tuple[int, int], whole: tuple[int, int], sides: tuple[int, int]
) -> tuple[int, int]:
    return tuple(n * length // side for n, length, side in zip(grid, whole, sides, strict=True))


def _zeros(layer: LayerFeatures, whole: tuple[int, int], sides: tuple[int, int]) -> list:
    """Sums of class tokens and of patches, at first."""
    batch, width = layer.tokens.shape[0], layer.tokens.shape[-1]
    shape = (batch, *_canvas(layer.grid, whole, sides), width)
    return [jnp.zeros((batch, width)), jnp.zeros(shape)]


def _add(total: list, layer: LayerFeatures, corner: jax.Array, sides: tuple[int, int]) -> list:
    of_class, canvas = total
    if layer.has_class_token:
        of_class = of_class + layer.class_token
    rows, columns = layer.grid
    begin = (0, corner[0] * rows // sides[0], corner[1] * columns // sides[1], 0)
    old = jax.lax.dynamic_slice(canvas, begin, layer.map.shape)
    return [of_class, jax.lax.dynamic_update_slice(canvas, old + layer.map, begin)]


def _mean(
    layer: LayerFeatures, total: list, corners: np.ndarray, sides: tuple[int, int]
) -> LayerFeatures:
    of_class, canvas = total
    grid = canvas.shape[1:3]
    counts = np.zeros((*grid, 1), np.float32)
    for top, left in corners * np.array(layer.grid) // np.array(sides):
        counts[top : top + layer.grid[0], left : left + layer.grid[1]] += 1
    tokens = (canvas / counts).reshape(len(canvas), -1, canvas.shape[-1])
    if layer.has_class_token:
        tokens = jnp.concatenate([of_class[:, None] / len(corners), tokens], axis=1)
    return layer.replace(tokens=tokens, grid=grid)
