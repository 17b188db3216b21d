"""Draws images with a line of text each into one PNG file."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from vit_jax.pictures import letters

_TILE, _TEXT, _GAP, _LETTERS = 128, 18, 8, 12


def draw_sheet(tiles: Sequence[tuple[np.ndarray, str]], path: pathlib.Path) -> None:
    """A sheet of (image (H, W, C) uint8, caption) tiles, about as wide as it is high. Of images with
    other channels than RGB the first is shown, as grey.
    """
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    sheet = Image.new(
        "RGB", (columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _TEXT + _GAP) + _GAP), "white"
    )
    pen = ImageDraw.Draw(sheet)
    for i, (image, caption) in enumerate(tiles):
        x, y = _GAP + i % columns * (_TILE + _GAP), _GAP + i // columns * (_TILE + _TEXT + _GAP)
        shown = Image.fromarray(image if image.shape[2] == 3 else image[..., 0].copy())
        sheet.paste(ImageOps.contain(shown, (_TILE, _TILE), Image.Resampling.NEAREST), (x, y))
        written = letters.fitted(caption, _LETTERS, _TILE)
        pen.text((x, y + _TILE), written, fill="black", font=letters.font(_LETTERS))
    sheet.save(path, format="PNG")
