"""A part of decoded pixels at another size, with NumPy and Pillow: what `native/` does, where that was
not compiled and for what it leaves to others. Both give the same picture up to rounding.
"""

import functools
import math

import cv2
import numpy as np
from PIL import Image

from vit_jax.data.crops import Part

BLOCK = 8  # pixels of a side of the blocks that JPEG transforms

# A JPEG is decoded at half its size (or a quarter, an eighth) while each side keeps this many times
# the pixels of the result. Of 200 photos that leaves 44 dB to a full decode at worst for bilinear
# crops of 224 pixels, 35 for those of 32; for bicubic ones, which are sharper, 45 at any size.
SPARE = {"bilinear": 1.5, "bicubic": 3.0}


def cut_pixels(pixels: np.ndarray, part: Part, out: np.ndarray, interpolation: str) -> None:
    """Resizes a part of `pixels` into `out` with an antialiased filter, which reaches over two
    pixels of the result (bilinear) or four (bicubic), or of the source where that grows.

    Args:
      pixels, out: (H, W, C) uint8.
      interpolation: 'bilinear', a triangle, or 'bicubic', Keys' cubic with a = -1/2.
    """
    method = Image.Resampling[interpolation.upper()]
    (top, left, bottom, right), inside = part
    if inside:  # what is outside does not count: cut first
        above, before = math.floor(top), math.floor(left)
        pixels = pixels[above : math.ceil(bottom), before : math.ceil(right)]
        top, left, bottom, right = top - above, left - before, bottom - above, right - before
    size, box = out.shape[1::-1], (left, top, right, bottom)
    if out.shape[2] == 3:
        out[:] = Image.fromarray(pixels).resize(size, method, box=box)
        return
    for channel in range(out.shape[2]):
        plane = Image.fromarray(np.ascontiguousarray(pixels[..., channel]))
        out[..., channel] = plane.resize(size, method, box=box)


def jpeg_scale(part: Part, height: int, width: int, interpolation: str) -> int:
    """The pixels (8, 4, 2 or 1) to which the 8 of a side of a block are decoded, for a result of
    this size.
    """
    (top, left, bottom, right), _ = part
    scale, needed = BLOCK, 2 * BLOCK * SPARE[interpolation]
    while scale > 1 and min((bottom - top) / height, (right - left) / width) * scale >= needed:
        scale //= 2
    return scale


def shrink_blocks(
    pixels: np.ndarray, part: Part, height: int, width: int, scale: int, *, chroma_halved: bool
) -> tuple[np.ndarray, Part]:
    """Decoded pixels as if the JPEG file had been decoded at a fraction of its size: of each block
    of 8 × 8 samples the `scale` × `scale` lowest frequencies alone.

    Args:
      pixels: (H, W, C) uint8, of the whole image.
      part: what is cut out of it for a result of `height` × `width`.
      scale: below 8, see `jpeg_scale`.
      chroma_halved: whether the file has a sample of chroma for 2 × 2 pixels (4:2:0). Such blocks
        have twice the pixels a side, and keep twice the frequencies.

    Returns:
      The smaller pixels, of little more than the part needs, and the part of these.
    """
    (box, inside), fraction, corner, region = part, scale / BLOCK, [], []
    for axis, result in enumerate((height, width)):
        low, high = box[axis], box[axis + 2]
        reach = 0 if inside else math.ceil(2 * (high - low) / result)  # of the wider filter
        around = 2 * BLOCK + reach
        corner.append(max(math.floor(low - around), 0) // (2 * BLOCK) * 2 * BLOCK)
        region.append(slice(corner[axis], math.ceil(high + around)))
    pixels = pixels[tuple(region)].astype(np.float32)
    tall, wide = (math.ceil(length * fraction) for length in pixels.shape[:2])
    padding = [(0, -length % (2 * BLOCK)) for length in pixels.shape[:2]]
    pixels = np.pad(pixels, (*padding, (0, 0)), mode="edge")
    if chroma_halved and pixels.shape[2] == 3:
        luma, *chroma = np.moveaxis(cv2.cvtColor(pixels, cv2.COLOR_RGB2YCrCb), 2, 0)
        chroma = (_before_upsampling(_before_upsampling(plane)) for plane in chroma)
        planes = [_shrink(luma, scale), *(_shrink(plane, 2 * scale) for plane in chroma)]
        pixels = cv2.cvtColor(np.stack(planes, axis=2), cv2.COLOR_YCrCb2RGB)
    else:
        pixels = np.stack([_shrink(plane, scale) for plane in np.moveaxis(pixels, 2, 0)], axis=2)
    pixels = np.clip(np.rint(pixels[:tall, :wide]), 0, 255).astype(np.uint8)
    return pixels, (tuple((box[i] - corner[i % 2]) * fraction for i in range(4)), inside)


def _shrink(plane: np.ndarray, scale: int) -> np.ndarray:
    """(H, W) float32, multiples of 8, at `scale` eighths of its size."""
    for _ in range(2):  # columns, then rows
        blocks = plane.reshape(-1, BLOCK, plane.shape[1])
        plane = (_low_frequencies(scale) @ blocks).reshape(-1, plane.shape[1]).T
    return plane


def _before_upsampling(plane: np.ndarray) -> np.ndarray:
    """The samples of which a JPEG decoder made the rows of `plane`, two of each: three quarters of
    it and one of its neighbour on that side. Transposed, for the columns to follow.
    """
    even, odd = plane[::2], plane[1::2]
    above = np.concatenate([even[:1], odd[:-1]])
    below = np.concatenate([even[1:], odd[-1:]])
    return ((3 * (even + odd) - above - below) / 4).T


@functools.cache
def _low_frequencies(scale: int) -> np.ndarray:
    """(scale, 8) float32: from the pixels of a line of a block to those of the smaller one, by way
    of its `scale` lowest frequencies.
    """
    transforms = []
    for size in (BLOCK, scale):
        frequency, place = np.mgrid[:size, :size]
        cosines = np.cos(np.pi * frequency * (2 * place + 1) / (2 * size))
        cosines[0] /= math.sqrt(2)
        transforms.append(cosines / math.sqrt(size / 2))
    whole, small = transforms
    return (small.T @ whole[:scale] * math.sqrt(scale / BLOCK)).astype(np.float32)
