"""Draws images with a line of text each into one PNG file."""

import math
import pathlib
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

_TILE, _TEXT, _GAP = 128, 18, 8


def draw_sheet(tiles: Sequence[tuple[np.ndarray, str]], path: pathlib.Path) -> None:
    """A sheet of (image (H, W, C) uint8, caption) tiles, about as wide as it is high. Of images with
    other channels than RGB the first is shown, as grey.
    """
    columns = math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    font = ImageFont.load_default(size=13)
    sheet = Image.new(
        "RGB", (columns * (_TILE + _GAP) + _GAP, rows * (_TILE + _TEXT + _GAP) + _GAP), "white"
    )
    pen = ImageDraw.Draw(sheet)
    for i, (image, caption) in enumerate(tiles):
        x, y = _GAP + i % columns * (_TILE + _GAP), _GAP + i // columns * (_TILE + _TEXT + _GAP)
        shown = Image.fromarray(image if image.shape[2] == 3 else image[..., 0].copy())
        sheet.paste(ImageOps.contain(shown, (_TILE, _TILE), Image.Resampling.NEAREST), (x, y))
        while font.getlength(caption) > _TILE:
            caption = caption[:-2].rstrip("…") + "…"
        pen.text((x, y + _TILE), caption, fill="black", font=font)
    sheet.save(path, format="PNG")
