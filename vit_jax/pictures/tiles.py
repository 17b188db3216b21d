"""Tiles side by side: maps of numbers as colours, images as they are, with a bar that says what the
colours mean.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.pictures import style
from vit_jax.pictures.style import GAP, LETTER, SCALE, TITLE


@dataclasses.dataclass(frozen=True)
class Bar:
    """What colours mean.

    Attributes:
      low, high: the numbers at its ends.
      unit: what they count.
      scheme: `sequential`, or `diverging` around the middle.
    """

    low: float
    high: float
    unit: str
    scheme: str = "sequential"


def draw(
    title: str,
    tiles: Sequence[np.ndarray],
    *,
    names: Sequence[str] = (),
    columns: int | None = None,
    bar: Bar | None = None,
    side: int = 96,
    gap: int | None = None,
    rows_named: Sequence[str] = (),
    x: str = "",
    y: str = "",
) -> Image.Image:
    """Tiles row by row.

    Args:
      title: above all.
      tiles: each (h, w) numbers, coloured as `bar` says, or (h, w, 3) uint8.
      names: of the tiles, below each.
      columns: tiles in a row; by default about as many as rows.
      bar: for tiles of numbers.
      side: of a tile as shown, its longer one, in pixels.
      gap: between tiles as shown, in pixels.
      rows_named: names of the rows of tiles, at the left.
      x, y: what runs from left to right and from top to bottom.
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    height, width = np.asarray(tiles[0]).shape[:2]
    factor = SCALE * side / max(height, width)
    # A map of one row is still to be seen.
    cell = (max(round(width * factor), LETTER), max(round(height * factor), LETTER))
    between = GAP if gap is None else SCALE * gap
    below = LETTER + GAP // 2 if names else 0
    left = 2 * GAP + max((style.width(name) + GAP for name in rows_named), default=0)
    left += LETTER + GAP if y else 0
    area = (columns * (cell[0] + between) - between, rows * (cell[1] + between + below) - between)
    room, tall = (0, 0) if bar is None else (_bar_width(bar), _bar_height(bar, area[1]))
    lines = style.wrapped(title, max(left + area[0] + room, 480 * SCALE) - GAP, TITLE)
    top = GAP + len(lines) * (TITLE + GAP // 2) + GAP // 2
    foot = LETTER + GAP if x else 0
    whole = max(left + area[0] + room + GAP, GAP + max(style.width(line, TITLE) for line in lines))
    height_needed = top + max(area[1] + foot, tall) + 2 * GAP
    image = Image.new("RGB", (whole, height_needed), "white")
    for number, line in enumerate(lines):
        style.write(image, (GAP, GAP + number * (TITLE + GAP // 2)), line, size=TITLE)
    for number, tile in enumerate(tiles):
        column, row = number % columns, number // columns
        at = (left + column * (cell[0] + between), top + row * (cell[1] + between + below))
        image.paste(_as_image(tile, bar).resize(cell, _filter(tile, cell)), at)
        if names:
            name = style.shorten(names[number], cell[0] + between)
            style.write(image, (at[0] + cell[0] / 2, at[1] + cell[1] + GAP // 4), name, anchor="ma")
    for number, name in enumerate(rows_named):
        row = top + number * (cell[1] + between + below) + cell[1] / 2
        style.write(image, (left - GAP, row), name, anchor="rm")
    if bar is not None:
        _draw_bar(image, bar, (left + area[0] + 2 * GAP, top), tall)
    if x:
        style.write(image, (left + area[0] / 2, top + area[1] + GAP), x, anchor="ma")
    if y:
        style.write_upwards(image, (GAP + LETTER / 2, top + area[1] / 2), y)
    return image


def matrix(
    title: str,
    values: np.ndarray,
    bar: Bar,
    *,
    x: str,
    y: str,
    side: int = 320,
    first: tuple[int, int] = (1, 1),
) -> Image.Image:
    """One map with its rows and columns numbered, from `first` on."""
    values = np.asarray(values)
    rows, columns = values.shape
    cell = max(SCALE * side // max(rows, columns), 2)
    left, lines = 3 * GAP + 3 * LETTER, style.wrapped(title, 480 * SCALE, TITLE)
    top = GAP + len(lines) * (TITLE + GAP // 2) + GAP // 2
    area = (cell * columns, cell * rows)
    whole = max(
        left + area[0] + _bar_width(bar) + GAP,
        GAP + max(style.width(line, TITLE) for line in lines),
    )
    tall = _bar_height(bar, area[1])
    needed = top + max(area[1] + 2 * LETTER + GAP, tall) + 2 * GAP
    image = Image.new("RGB", (whole, needed), "white")
    for number, line in enumerate(lines):
        style.write(image, (GAP, GAP + number * (TITLE + GAP // 2)), line, size=TITLE)
    tile = _as_image(values, bar).resize(area, Image.Resampling.NEAREST)
    image.paste(tile, (left, top))
    every = max(1, math.ceil(1.6 * LETTER / cell))
    for number in range(0, columns, every):
        at = (left + (number + 0.5) * cell, top + area[1] + GAP // 4)
        style.write(image, at, str(first[1] + number), anchor="ma")
    for number in range(0, rows, every):
        at = (left - GAP // 2, top + (number + 0.5) * cell)
        style.write(image, at, str(first[0] + number), anchor="rm")
    style.write(image, (left + area[0] / 2, top + area[1] + LETTER + GAP), x, anchor="ma")
    style.write_upwards(image, (GAP + LETTER / 2, top + area[1] / 2), y)
    _draw_bar(image, bar, (left + area[0] + 2 * GAP, top), tall)
    return image


def _as_image(tile: np.ndarray, bar: Bar | None) -> Image.Image:
    tile = np.asarray(tile)
    if tile.ndim == 3:
        return Image.fromarray(np.ascontiguousarray(tile))
    return Image.fromarray(style.coloured(tile, bar.low, bar.high, bar.scheme))


def _filter(tile: np.ndarray, cell: tuple[int, int]) -> Image.Resampling:
    """Photos that shrink are averaged; numbers stay the squares that they are."""
    shrinks = np.asarray(tile).shape[1] > cell[0]
    return Image.Resampling.LANCZOS if shrinks else Image.Resampling.NEAREST


def _bar_width(bar: Bar) -> int:
    widest = max(style.width(style.number(tick)) for tick in style.ticks(bar.low, bar.high, 4))
    return 2 * GAP + LETTER + GAP + widest + GAP + 2 * LETTER


def _bar_height(bar: Bar, beside: int) -> int:
    """As high as what it stands beside, but no more than needs be, and with room for its unit."""
    return max(min(beside, 260 * SCALE), style.width(bar.unit) + GAP, 6 * LETTER)


def _draw_bar(image: Image.Image, bar: Bar, at: tuple[int, int], height: int) -> None:
    pen, (left, top) = ImageDraw.Draw(image), at
    values = np.linspace(bar.high, bar.low, height)[:, None].repeat(LETTER, axis=1)
    colours = style.coloured(values, bar.low, bar.high, bar.scheme)
    image.paste(Image.fromarray(colours), (left, top))
    widest = 0
    for tick in style.ticks(bar.low, bar.high, 4):
        row = top + (bar.high - tick) / ((bar.high - bar.low) or 1) * height
        pen.line((left + LETTER, row, left + LETTER + GAP // 2, row), "black", SCALE)
        text = style.number(tick)
        style.write(image, (left + LETTER + GAP, row), text, anchor="lm")
        widest = max(widest, style.width(text))
    centre = (left + LETTER + 2 * GAP + widest + LETTER / 2, top + height / 2)
    style.write_upwards(image, centre, bar.unit)
