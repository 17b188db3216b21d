"""Images at sizes of their own: the size that a number of patches allows (SigLIP 2's NaFlex, arXiv 2502.14786 §2.4.2),
and a padded batch of their patches. Which positions they have is the model's.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data.decoding import decode, images
from vit_jax.data.options import Data
from vit_jax.models.contract import PatchBatch
from vit_jax.models.embeddings import cut_patches

_SCALES = 1e-6, 100.0
_PRECISION = 1e-5


def choose_grids(heights, widths, *, patch: int, tokens: int) -> np.ndarray:
    """Rows and columns of the patches of images: the largest scale at which they are `tokens` at most, found by
    bisection, sides rounded up to whole patches. That is all that their aspects change by. Small images are enlarged.
    The arithmetic is float64's of big_vision, timm and transformers, which decides where sizes are a tie.

    Args:
      heights, widths: of images in pixels, (n,) or numbers.

    Returns:
      (n, 2) int32, or (2,).
    """
    sides = np.stack([np.asarray(heights, np.float64), np.asarray(widths, np.float64)], axis=-1)

    def grids(scale):
        return np.maximum(np.ceil(sides * scale[..., None] / patch), 1)

    low, high = (np.full(sides.shape[:-1], scale) for scale in _SCALES)
    while np.max(high - low, initial=0) >= _PRECISION:
        middle = (low + high) / 2
        fits = grids(middle).prod(-1) <= tokens
        low, high = np.where(fits, middle, low), np.where(fits, high, middle)
    return grids(low).astype(np.int32)


def read_image(
    image: bytes | np.ndarray, data: Data, *, patch: int, tokens: int, name: str
) -> np.ndarray:
    """A whole image at the size that `choose_grids` gives it, (H, W, C) uint8.

    Args:
      image: the file's bytes, or its pixels.
      data: the section `config.data`, whose `image_size` and `eval_crop` do not count.
      name: what to call the image in errors.

    Raises:
      BadImage: see `decode.decode`.
    """
    head = None
    if isinstance(image, bytes):
        head = images.check_image(image, name, data.max_pixels)
    if head is not None and head.kind == images.JPEG:  # which is decoded no larger than needed
        height, width = head.details.upright
    else:
        options = dict(channels=data.channels, max_pixels=data.max_pixels)
        image = decode.decode(image, name=name, **options)
        height, width = image.shape[:2]
    rows, columns = choose_grids(height, width, patch=patch, tokens=tokens).tolist()
    size = (rows * patch, columns * patch)
    return decode.eval_crop(
        image, dataclasses.replace(data, image_size=size, eval_crop="resize"), name=name
    )


def pad_batch(
    pixels: Sequence[np.ndarray], *, patch: int, tokens: int, rows: int, channels: int
) -> PatchBatch:
    """Images (H, W, C) uint8 whose sides are multiples of `patch` as `rows` rows of `tokens` patches; further rows
    are images of one black patch.
    """
    patches = np.zeros((rows, tokens, patch * patch * channels), np.uint8)
    grids = np.ones((rows, 2), np.int32)
    for i, image in enumerate(pixels):
        grids[i] = [side // patch for side in image.shape[:2]]
        split = cut_patches(image[None], tuple(grids[i].tolist()))[0]
        patches[i, : len(split)] = split
    return PatchBatch(patches, grids)
