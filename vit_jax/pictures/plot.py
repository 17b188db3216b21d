"""Curves, bands and dots over two axes."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_jax.pictures import letters, style

_SIZE = (520, 320)  # of the axes alone, as shown
_AROUND = (80, 50)  # for ticks and names
_RIGHT = 0.8  # share of the x axis from which on notes stand at the left


class Plot:
    """A picture with a title and two named axes; both hold all that is drawn, unless limits are given. Numbers that are
    not negative have no axis below 0, and percentages of a whole none above 100.

    >>> plot = Plot("Accuracy over steps", x="step", y="accuracy [%]")
    >>> plot.line([0, 100, 200], [10, 80, 90], label="seed 1")
    >>> plot.image().save("accuracy.png")
    """

    def __init__(
        self, title: str, *, x: str, y: str, x_limits: tuple[float, float] | None = None,
        y_limits: tuple[float, float] | None = None, size: tuple[int, int] = _SIZE,
        y_names: Sequence[str] = (), logarithmic: bool = False, whole: bool = False,
        logarithmic_y: bool = False, from_zero: bool = False,
    ):  # fmt: skip
        """An empty one.

        Args:
          title, x, y: what is written above, below and at the left.
          x_limits, y_limits: where the axes end.
          size: of the axes as shown, in pixels.
          y_names: of rows, the first, 0, above all others; instead of numbers.
          logarithmic: the x axis is, for numbers above 0.
          logarithmic_y: the y axis is, for numbers above 0.
          whole: the x axis counts; nothing is written between whole numbers.
          from_zero: the y axis begins at 0, where all numbers are at least that.
        """
        names = style.LETTER * max(map(len, y_names), default=0)
        width, height = (a + b for a, b in zip(size, _AROUND, strict=True))
        self._figure = style.figure(title, width + names, height)
        self._axes = axes = self._figure.subplots()
        # Longer names would be cut at the edge.
        x, y = (
            textwrap.fill(letters.drawable(name), max(int(side / (style.LETTER + 1)), 10))
            for name, side in zip((x, y), (size[0] + names, size[1]), strict=True)
        )
        self._percent = [name.endswith("[%]") for name in (x, y)]
        self._from_zero = from_zero
        axes.set(xlabel=x, ylabel=y)
        axes.grid(color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.ticklabel_format(useOffset=False)
        if logarithmic:
            axes.set_xscale("log", subs=(2, 3, 4, 5, 6, 7, 8, 9))
            axes.xaxis.get_major_locator().set_params(subs=(1, 3))  # pyrefly: ignore
            axes.xaxis.set_major_formatter("{x:g}")
            axes.xaxis.set_minor_formatter("")
        else:
            axes.locator_params(axis="x", nbins=6)  # more of 0.00125 would touch
        if logarithmic_y:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("")
        if whole:
            axes.xaxis.get_major_locator().set_params(integer=True)  # pyrefly: ignore
        if x_limits:
            axes.set_xlim(x_limits)
        if y_names:
            axes.set_yticks(range(len(y_names)), map(letters.drawable, y_names))
            y_limits = (len(y_names) - 0.5, -0.5)
        if y_limits:
            axes.set_ylim(y_limits)
        self._labels: set[tuple[str, str]] = set()
        self._notes: list[tuple[float, float, str, str]] = []

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: str = style.BLUE, label: str = "",
        width: int = 2, marked: bool = False,
    ) -> None:  # fmt: skip
        """A curve through points, in two where one is not finite.

        Args:
          marked: whether the points are seen, since nothing is known between them; of two there is no curve.
        """
        count = np.isfinite(np.asarray(ys, np.float64)).sum()
        marker = "o" if marked or count == 1 else ""  # A point alone would not be seen.
        self._axes.plot(
            xs, ys, color=colour, linewidth=0 if marked and count < 3 else width * 0.75, marker=marker,
            markersize=5 if marked else 3, label=self._new(label, colour), clip_on=not marked,
        )  # fmt: skip

    def dots(
        self, xs: Sequence[float], ys: Sequence[float], colour: str = style.BLUE, label: str = "",
        radius: int = 4, shape: str = "o",
    ) -> None:  # fmt: skip
        """Points.

        Args:
          shape: a marker of matplotlib.
        """
        self._axes.plot(
            xs, ys, shape, color=colour, markersize=1.5 * radius, label=self._new(label, colour),
            clip_on=False,  # one on an axis is whole
        )  # fmt: skip

    def band(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float],
        colour: str = style.BLUE, label: str = "",
    ) -> None:  # fmt: skip
        """The area between two curves, pale."""
        pale = dict(color=colour, alpha=0.22, linewidth=0)
        self._axes.fill_between(xs, lows, highs, label=self._new(label, f"pale {colour}"), **pale)

    def note(self, x: float, y: float, text: str, colour: str = "black") -> None:
        """A few letters beside a point."""
        self._notes.append((x, y, text, colour))

    def image(self) -> Image.Image:
        """The whole."""
        self._limit()
        place = self._axes.transData + self._axes.transAxes.inverted()
        for x, y, text, colour in self._notes:
            at_right = place.transform((x, y))[0] > _RIGHT
            self._axes.annotate(
                letters.drawable(text), (x, y), (-6 if at_right else 6, 0), textcoords="offset points",
                ha="right" if at_right else "left", va="center", color=colour,
            )  # fmt: skip
        if self._labels:
            legend_width = style.LETTER * max(len(label) for label, _ in self._labels) + 50
            style.widen(self._figure, legend_width)
            self._axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.02), frameon=False)
        # Which numbers stand at the left depends on the height of the axes, and their width on which they
        # are: settled, so that the axis' name finds its place beside them.
        self._figure.draw_without_rendering()
        low, high = sorted(self._axes.get_ylim())
        self._axes.set_yticks([tick for tick in self._axes.get_yticks() if low <= tick <= high])
        return style.image(self._figure)

    def _limit(self) -> None:
        """Ends the axes where numbers do."""
        axes, data = self._axes, self._axes.dataLim
        for percent, get, put, least, most in (
            (self._percent[0], axes.get_xlim, axes.set_xlim, data.xmin, data.xmax),
            (self._percent[1], axes.get_ylim, axes.set_ylim, data.ymin, data.ymax),
        ):
            low, high = get()
            if percent and least >= 0 and most <= 100 < high and low < high:
                put(low, 100)
        low, high = axes.get_ylim()
        if (low < 0 or self._from_zero) and data.ymin >= 0 and low < high:
            axes.set_ylim(0, high if data.ymax > 0 else 1)

    def _new(self, label: str, colour: str) -> str | None:
        """A label that the legend does not have in this colour yet."""
        label = letters.drawable(label)
        if not label or (label, colour) in self._labels:
            return None
        self._labels.add((label, colour))
        return label
