"""Label maps as pictures: a colour for each class, to lay over an image, and which is which."""

import colorsys
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_ALPHA = 128  # of the classes' colours over an image
_LINE = 255  # the number of what separates segments; label maps have fewer classes
_ROW, _SWATCH, _WIDTH = 18, 12, 180  # pixels of a legend


def palette(count: int) -> np.ndarray:
    """(count, 3) uint8: black for the first class, and hues that differ as much as they can for the others."""
    golden = 0.618034
    hues = ((i * golden) % 1 for i in range(count - 1))
    found = [colorsys.hsv_to_rgb(h, 0.6 + 0.4 * (i % 2), 0.95) for i, h in enumerate(hues)]
    return np.round(255 * np.array([(0, 0, 0), *found])).astype(np.uint8)


def mask_picture(labels: np.ndarray, count: int) -> Image.Image:
    """A label map (H, W) uint8 as a PNG keeps it: class numbers, with a palette to look at."""
    picture = Image.fromarray(labels, mode="P")
    picture.putpalette(palette(count).reshape(-1).tolist())
    return picture


def layer(labels: np.ndarray, count: int, lines: np.ndarray | None = None) -> Image.Image:
    """The classes' colours, to lay over the image: they are half transparent, and where `lines` (H, W) bool is true
    it is white.
    """
    colors = np.full((_LINE + 1, 4), 255, np.uint8)
    colors[:count, :3], colors[:_LINE, 3] = palette(count), _ALPHA
    numbers = labels if lines is None else np.where(lines, np.uint8(_LINE), labels)
    picture = Image.fromarray(numbers, mode="P")
    picture.putpalette(colors.reshape(-1).tolist(), "RGBA")
    return picture


def overlay(image: np.ndarray, over: Image.Image) -> Image.Image:
    """An image (H, W, C) uint8 with a `layer` over it."""
    pixels = image if image.shape[2] == 3 else image[..., :1].repeat(3, 2)
    below = Image.fromarray(pixels).convert("RGBA")
    return Image.alpha_composite(below, over.convert("RGBA")).convert("RGB")


def legend(rows: Sequence[tuple[str, tuple[int, ...]]]) -> Image.Image:
    """Texts with the colours that they explain, one below the other."""
    sheet = Image.new("RGB", (_WIDTH, _ROW * len(rows)), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for row, (text, color) in enumerate(rows):
        left, top = 6, row * _ROW + 3
        pen.rectangle((left, top, left + _SWATCH, top + _SWATCH), fill=color)
        pen.text((left + _SWATCH + 6, top - 2), text, fill="black", font=font)
    return sheet
