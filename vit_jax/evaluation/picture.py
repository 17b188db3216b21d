"""Draws images with a line of text each into one PNG file."""

import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_TILE, _TEXT, _GAP = 128, 18, 8


def draw(tiles: Sequence[tuple[np.ndarray, str]], path: str) -> None:
    """A sheet of (image (S, S, 3) uint8, caption) tiles, about as wide as it is high."""
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    font = ImageFont.load_default(size=13)
    sheet = Image.new(
        "RGB", (columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _TEXT + _GAP) + _GAP), "white"
    )
    pen = ImageDraw.Draw(sheet)
    for i, (image, caption) in enumerate(tiles):
        x, y = _GAP + i % columns * (_TILE + _GAP), _GAP + i // columns * (_TILE + _TEXT + _GAP)
        sheet.paste(Image.fromarray(image).resize((_TILE, _TILE), Image.Resampling.NEAREST), (x, y))
        while font.getlength(caption) > _TILE:
            caption = caption[:-2].rstrip("…") + "…"
        pen.text((x, y + _TILE), caption, fill="black", font=font)
    sheet.save(path)
