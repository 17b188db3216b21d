"""Colours and sizes that all pictures share, and how a figure of matplotlib becomes an image."""

import textwrap
from typing import TYPE_CHECKING

import numpy as np
from PIL import Image

from vit_jax.pictures import letters

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SCALE = 2  # pixels drawn for a pixel of the page, so that print is sharp
BLUE, GREY = "#1f5fbf", "#8a8a8a"
# Told apart by people who see few colours too (Okabe and Ito), and two more.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#444444")
SCHEMES = {"sequential": "viridis", "diverging": "RdBu_r"}
LETTER, LINE = 6, 20  # pixels of the page: width of a letter, height of a line of the title
_DPI, _POINTS = 100, 9
LETTERS = 10 * _DPI / 72  # pixels of the page: the 10 points that matplotlib gives to names of axes


def figure(title: str, width: float, height: float, left: float = 0) -> "Figure":
    """A figure with a title, and below it room for this many pixels of the page; what is put there finds its
    place by itself, right of the first `left` pixels. No window knows of it.
    """
    import matplotlib.figure

    title = textwrap.fill(letters.drawable(title), max(int(width / (LETTER + 2.5)), 20))
    above = 8 + LINE * (title.count("\n") + 1)
    whole = height + above
    with matplotlib.rc_context({"font.size": _POINTS}):
        new_figure = matplotlib.figure.Figure(
            figsize=(width / _DPI, whole / _DPI), dpi=_DPI * SCALE, layout="constrained"
        )
        new_figure.text(8 / width, 1 - 6 / whole, title, fontsize="large", va="top")
    new_figure.get_layout_engine().set(rect=(left / width, 0, 1 - left / width, 1 - above / whole))
    return new_figure


def widen(figure: "Figure", pixels: float) -> None:
    """Adds room at the right."""
    width, height = figure.get_size_inches()
    figure.set_size_inches(width + pixels / _DPI, height)


def image(figure: "Figure") -> Image.Image:
    """A figure as pixels, as large as what is in it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy())
