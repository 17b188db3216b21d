"""Tiles side by side: maps of numbers as colours, images as they are, with a bar that says what the
colours mean.
"""

import dataclasses
import math
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.pictures import letters, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAME = 16  # pixels of the page: a line of letters
_LONGEST = 18  # letters of a name beside a map
_LEAST, _THIN, _BAR = 320, 12, 10  # of a whole picture, of a tile, and of a bar


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


def draw_tiles(
    title: str,
    tiles: Sequence[np.ndarray | None],
    *,
    names: Sequence[str] = (),
    columns: int | None = None,
    bar: Bar | None = None,
    side: int = 96,
    gap: int | None = None,
    rows_named: Sequence[str] = (),
    columns_named: Sequence[str] = (),
    x: str = "",
    y: str = "",
) -> Image.Image:
    """Tiles row by row.

    Args:
      title: above all.
      tiles: each (h, w) numbers, coloured as `bar` says, (h, w, 3) uint8, or `None` for an empty place; the
        first is none.
      names: of the tiles, below each, in one or more lines.
      columns: tiles in a row; by default about as many as rows.
      bar: for tiles of numbers.
      side: of a tile as shown, its longer one, in pixels.
      gap: between tiles as shown, in pixels.
      rows_named, columns_named: names of the rows of tiles, at the left, and of the columns, above.
      x, y: what runs from left to right and from top to bottom.
    """
    columns = columns or math.ceil(math.sqrt(len(tiles)))
    rows = math.ceil(len(tiles) / columns)
    height, width = np.asarray(tiles[0]).shape[:2]
    gap = 8 if gap is None else gap
    # A map of one row is still to be seen.
    sides = [max(side * length / max(height, width), _THIN) for length in (height, width)]
    lines = max((name.count("\n") + 1 for name in names), default=0)
    tall, wide = sides[0] + gap + _NAME * lines, sides[1] + gap
    left = style.LETTER * (max(map(len, rows_named)) + 2) if rows_named else 0
    whole = max(columns * wide + left + (80 if bar else 0) + (_NAME if y else 0) + 20, _LEAST)
    above = _NAME * (bool(x) + bool(columns_named))
    figure = style.figure(title, whole, rows * tall + 20 + above, left)
    figure.get_layout_engine().set(w_pad=gap / 200, h_pad=gap / 200, wspace=0, hspace=0)
    grid = figure.subplots(rows, columns, squeeze=False)
    for number, axes in enumerate(grid.flat):
        axes.set(xticks=[], yticks=[])
        if number >= len(tiles) or tiles[number] is None:
            axes.set_axis_off()
            continue
        _show(axes, tiles[number], bar, aspect="auto" if min(sides) == _THIN else "equal")
        if names:
            axes.set_xlabel(letters.fitted(names[number], style.LETTERS, wide - 4))
    for name, axes in zip(rows_named, grid[:, 0], strict=False):
        axes.set_ylabel(letters.drawable(name), rotation=0, ha="right", va="center").set_in_layout(
            False
        )
    for name, axes in zip(columns_named, grid[0], strict=False):
        axes.set_title(letters.drawable(name), fontsize="medium", pad=2)
    if x:
        figure.supxlabel(x, fontsize="medium")
    if y:
        figure.supylabel(y, fontsize="medium")
    if bar:
        _draw_bar(figure, bar, grid)
    return style.image(figure)


def matrix(
    title: str,
    values: np.ndarray,
    bar: Bar,
    *,
    x: str,
    y: str,
    side: int = 320,
    first: tuple[int, int] = (1, 1),
    names: Sequence[str] = (),
    counts: np.ndarray | None = None,
) -> Image.Image:
    """One map with its rows and columns numbered, or named.

    Args:
      title: above all.
      values: (rows, columns), coloured as `bar` says.
      x, y: what runs from left to right and from top to bottom.
      side: of the map as shown, its longer one, in pixels.
      first: the numbers of the first row and column.
      names: of both rows and columns, instead of numbers.
      counts: (rows, columns) integers, written into the cells that are not 0.
    """
    from matplotlib.ticker import MaxNLocator

    values = np.asarray(values)
    rows, columns = values.shape
    of_names = style.LETTER * min(max(map(len, names), default=0), _LONGEST)
    figure = style.figure(
        title, side + 180 + of_names, side * rows / max(rows, columns) + 70 + of_names
    )
    axes = figure.subplots()
    top, left = (number - 0.5 for number in first)
    ends = (left, left + columns, top + rows, top)
    _show(axes, values, bar, extent=ends)
    axes.set(xlabel=x, ylabel=y)
    if names:
        short = [letters.fitted(name, style.LETTERS, _LONGEST * style.LETTER) for name in names]
        axes.set_xticks(np.arange(columns) + left + 0.5, short, rotation=90)
        axes.set_yticks(np.arange(rows) + top + 0.5, short)
    else:
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    for row, column in () if counts is None else np.argwhere(counts):
        light = values[row, column] < (bar.low + bar.high) / 2  # viridis is dark there
        axes.text(
            column + left + 0.5, row + top + 0.5, f"{counts[row, column]}",
            ha="center", va="center", color="white" if light else "black", fontsize="small",
        )  # fmt: skip
    _draw_bar(figure, bar, axes)
    return style.image(figure)


def _show(axes: "Axes", tile: np.ndarray, bar: Bar | None, **options) -> None:
    tile = np.asarray(tile)
    if tile.ndim == 2:
        options |= dict(vmin=bar.low, vmax=bar.high, cmap=style.SCHEMES[bar.scheme])
    # Photos that shrink are averaged; numbers stay the squares that they are.
    axes.imshow(tile, interpolation="auto" if tile.ndim == 3 else "nearest", **options)
    for edge in axes.spines.values():
        edge.set_visible(False)


def _draw_bar(figure: "Figure", bar: Bar, axes: "np.ndarray | Axes") -> None:
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    colours = ScalarMappable(Normalize(bar.low, bar.high), style.SCHEMES[bar.scheme])
    length = 0.8 * figure.get_figheight() * figure.dpi / style.SCALE
    unit = textwrap.fill(bar.unit, max(int(length / style.LETTER) - 8, 10))  # no longer than it
    aspect = min(30, length / _BAR)
    figure.colorbar(colours, ax=axes, label=unit, aspect=aspect, fraction=0.05, pad=0.02)
