"""A part of decoded pixels at another size, by Pillow's antialiased filters."""

import math

import cv2
import numpy as np
from PIL import Image

from vit_jax.data.crops import Part

# A JPEG is decoded at half its size (or a quarter, an eighth) while each side of the part keeps this
# many times the pixels of the result: what is lost lies above the frequencies that the filter
# passes. Against a full decode that leaves 40 dB or more at any size of the result, see
# `tests/data/test_pixels.py`.
SPARE = {"bilinear": 2.0, "bicubic": 2.5}


def cut_pixels(pixels: np.ndarray, part: Part, out: np.ndarray, interpolation: str) -> None:
    """Resizes a part of `pixels` into `out` with an antialiased filter, which reaches over two
    pixels of the result (bilinear) or four (bicubic), or of the source where that grows.

    Args:
      pixels, out: (H, W, C) uint8.
      part: may reach beyond the pixels by a fraction of one, see `scaled`.
      interpolation: 'bilinear', a triangle, or 'bicubic', Keys' cubic with a = -1/2.
    """
    method = Image.Resampling[interpolation.upper()]
    (top, left, bottom, right), inside = part
    bottom = min(bottom, pixels.shape[0])
    right = min(right, pixels.shape[1])
    if inside:  # what is outside does not count: cut first
        above = math.floor(top)
        before = math.floor(left)
        pixels = pixels[above : math.ceil(bottom), before : math.ceil(right)]
        top = top - above
        left = left - before
        bottom = bottom - above
        right = right - before
    size = out.shape[1::-1]
    box = (left, top, right, bottom)
    if out.shape[2] == 3:
        out[:] = Image.fromarray(pixels).resize(size, method, box=box)
        return
    for channel in range(out.shape[2]):
        plane = Image.fromarray(np.ascontiguousarray(pixels[..., channel]))
        out[..., channel] = plane.resize(size, method, box=box)


def cut_labels(labels: np.ndarray, part: Part, out: np.ndarray) -> None:
    """Puts a part of a label map (H, W) into `out`: of each pixel the label nearest to its centre."""
    (top, left, bottom, right), _ = part
    picture = Image.fromarray(labels)
    size = out.shape[::-1]
    box = (left, top, right, bottom)
    out[:] = picture.resize(size, Image.Resampling.NEAREST, box)


def enlarged(values: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Values (h, w) float32 of each pixel at another size (H, W), bilinear."""
    return cv2.resize(values, size[::-1], interpolation=cv2.INTER_LINEAR)


def jpeg_scale(part: Part, height: int, width: int, interpolation: str) -> int:
    """By what a JPEG's sides may be divided (1, 2, 4 or 8) for a result of this size."""
    (top, left, bottom, right), _ = part
    shrinking = min((bottom - top) / height, (right - left) / width)
    room = shrinking / SPARE[interpolation]
    return next(scale for scale in (8, 4, 2, 1) if room >= scale or scale == 1)


def scaled(part: Part, scale: int) -> Part:
    """The part of an image whose sides were divided by `scale`, and rounded up."""
    (top, left, bottom, right), inside = part
    return (top / scale, left / scale, bottom / scale, right / scale), inside
