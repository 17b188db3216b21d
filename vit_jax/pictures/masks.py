"""Label maps as pictures: a colour for each class, to lay over an image, and which is which."""

import colorsys
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.pictures import letters

_ALPHA = 128  # of the classes' colours over an image
_ROW, _SWATCH, _LETTERS = 18, 12, 12  # pixels of a legend
_LEAST, _MOST = 180, 360  # of its width


def palette(count: int, *, black: bool = True) -> np.ndarray:
    """(count, 3) uint8: hues that differ as much as they can; `black`: the first class has none."""
    golden, first = 0.618034, [(0, 0, 0)] if black else []
    hues = ((i * golden) % 1 for i in range(count - len(first)))
    colors = [colorsys.hsv_to_rgb(h, 0.6 + 0.4 * (i % 2), 0.95) for i, h in enumerate(hues)]
    return np.round(255 * np.array([*first, *colors])).astype(np.uint8)


def mask_picture(labels: np.ndarray, colors: np.ndarray) -> Image.Image:
    """A label map (H, W) uint8 as a PNG keeps it: class numbers, with a palette to look at."""
    picture = Image.fromarray(labels, mode="P")
    picture.putpalette(colors.reshape(-1).tolist())
    return picture


def layer(labels: np.ndarray, colors: np.ndarray, lines: np.ndarray | None = None) -> Image.Image:
    """The classes' colours, to lay over the image: half transparent, and of pixels without a class (255) nothing is
    seen; where `lines` (H, W) bool is true it is white.
    """
    table, count = np.zeros((256, 4), np.uint8), len(colors)
    table[:count, :3], table[:count, 3] = colors, _ALPHA
    rgba = table[labels]
    if lines is not None:
        rgba[lines] = 255
    return Image.fromarray(rgba)


def overlay(image: np.ndarray, over: Image.Image) -> Image.Image:
    """An image (H, W, C) uint8 with a `layer` over it."""
    pixels = image if image.shape[2] == 3 else image[..., :1].repeat(3, 2)
    return Image.alpha_composite(Image.fromarray(pixels).convert("RGBA"), over).convert("RGB")


def legend(rows: Sequence[tuple[str, tuple[int, ...]]]) -> Image.Image:
    """Texts with the colours that they explain, one below the other."""
    font, left = letters.font(_LETTERS), 6
    text_left = left + _SWATCH + 6
    written = [letters.fitted(text, _LETTERS, _MOST - text_left) for text, _ in rows]
    width = max([_LEAST, *(text_left + math.ceil(font.getlength(text)) + left for text in written)])
    sheet = Image.new("RGB", (width, _ROW * len(rows)), "white")
    pen = ImageDraw.Draw(sheet)
    for row, (text, (_, color)) in enumerate(zip(written, rows, strict=True)):
        top = row * _ROW + 3
        pen.rectangle((left, top, left + _SWATCH, top + _SWATCH), fill=color)
        pen.text((text_left, top - 2), text, fill="black", font=font)
    return sheet


def side_by_side(pictures: Sequence[Image.Image]) -> Image.Image:
    """Pictures in a row."""
    size = sum(picture.width for picture in pictures), max(picture.height for picture in pictures)
    sheet, left = Image.new("RGB", size, "white"), 0
    for picture in pictures:
        sheet.paste(picture, (left, 0))
        left += picture.width
    return sheet
