"""Curves, bands and dots over two axes."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw

from vit_jax.pictures import style
from vit_jax.pictures.style import GAP, LETTER, SCALE, TITLE

_SIZE = (520, 320)  # of the axes alone, as shown


@dataclasses.dataclass(frozen=True)
class _Mark:
    """What is drawn: `line`, `dots` or `band`, in the places of the axes."""

    kind: str
    xs: np.ndarray
    ys: np.ndarray
    tops: np.ndarray | None
    colour: str
    width: int


class Plot:
    """A picture with a title and two named axes; both hold all that is drawn, unless limits are given.

    >>> plot = Plot("Accuracy over steps", x="step", y="accuracy [%]")
    >>> plot.line([0, 100, 200], [10, 80, 90], label="seed 1")
    >>> plot.image().save("accuracy.png")
    """

    def __init__(
        self, title: str, *, x: str, y: str, x_limits: tuple[float, float] | None = None,
        y_limits: tuple[float, float] | None = None, size: tuple[int, int] = _SIZE,
        y_names: Sequence[str] = (), logarithmic: bool = False, whole: bool = False,
    ):  # fmt: skip
        """An empty one.

        Args:
          title, x, y: what is written above, below and at the left.
          x_limits, y_limits: where the axes end.
          size: of the axes as shown, in pixels.
          y_names: of rows, the first, 0, above all others; instead of numbers.
          logarithmic: the x axis is, for numbers above 0.
          whole: the x axis counts; nothing is written between whole numbers.
        """
        self._title, self._x_name, self._y_name = title, x, y
        if y_names:
            y_limits = (len(y_names) - 0.5, -0.5)
        self._limits, self._size = (x_limits, y_limits), tuple(SCALE * side for side in size)
        self._y_names, self._logarithmic, self._whole = list(y_names), logarithmic, whole
        self._marks: list[_Mark] = []
        self._labels: list[tuple[str, str]] = []
        self._notes: list[tuple[float, float, str, str]] = []

    def line(
        self, xs: Sequence[float], ys: Sequence[float], colour: str = style.BLUE, label: str = "",
        width: int = 2,
    ) -> None:  # fmt: skip
        """A curve through points, in two where one is not finite."""
        self._add("line", xs, ys, None, colour, label, width)

    def dots(
        self, xs: Sequence[float], ys: Sequence[float], colour: str = style.BLUE, label: str = "",
        radius: int = 4,
    ) -> None:  # fmt: skip
        """Points."""
        self._add("dots", xs, ys, None, colour, label, radius)

    def band(
        self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float],
        colour: str = style.BLUE, label: str = "",
    ) -> None:  # fmt: skip
        """The area between two curves, pale."""
        self._add("band", xs, lows, np.asarray(highs, np.float64), colour, label, 0)

    def note(self, x: float, y: float, text: str, colour: str = "black") -> None:
        """A few letters beside a point."""
        self._notes.append((x, y, text, colour))

    def image(self) -> Image.Image:
        """The whole."""
        x_limits, y_limits = self._ranges()
        y_ticks = self._ticks(y_limits)
        legend = max((style.width(label) for label, _ in self._labels), default=-5 * GAP) + 5 * GAP
        left = 2 * GAP + LETTER + max(style.width(name) for name in y_ticks.values()) + GAP
        titles = style.wrapped(self._title, left + self._size[0] + legend - GAP, TITLE)
        top, bottom = GAP + len(titles) * (TITLE + GAP), 3 * GAP + 2 * LETTER
        whole = (left + self._size[0] + legend + GAP, top + self._size[1] + bottom)
        image = Image.new("RGB", whole, "white")
        self._box = (left, top, left + self._size[0], top + self._size[1])
        self._shown = (x_limits, y_limits)
        for number, line in enumerate(titles):
            style.write(image, (GAP, GAP + number * (TITLE + GAP)), line, size=TITLE)
        self._axes(image, y_ticks)
        self._draw(image)
        for number, (label, colour) in enumerate(self._labels):
            row = top + number * (LETTER + GAP // 2)
            corner = (self._box[2] + 2 * GAP, row + LETTER // 5)
            ImageDraw.Draw(image).rectangle(
                (*corner, corner[0] + LETTER, corner[1] + LETTER), colour
            )
            style.write(image, (corner[0] + LETTER + GAP // 2, row), label)
        return image

    def _add(self, kind, xs, ys, tops, colour, label, width) -> None:
        xs, ys = self._scaled(xs), np.asarray(ys, np.float64)
        self._marks.append(_Mark(kind, xs, ys, tops, colour, width))
        colour = _pale(colour) if kind == "band" else colour
        if label and (label, colour) not in self._labels:
            self._labels.append((label, colour))

    def _ranges(self) -> list[tuple[float, float]]:
        xs = [mark.xs for mark in self._marks]
        ys = [part for mark in self._marks for part in (mark.ys, mark.tops) if part is not None]
        found = []
        for given, values in zip(self._limits, (xs, ys), strict=True):
            if given is None:
                low, high = style.limits(np.concatenate(values) if values else [])
                room = 0.04 * (high - low)
                # Zero is an end of its own: nothing lies below where nothing is negative.
                at_zero = 0 <= low <= 2 * room and not (self._logarithmic and not found)
                given = (0.0 if at_zero else low - room, high + room)
            found.append(given)
        return found

    def _scaled(self, xs: Sequence[float]) -> np.ndarray:
        xs = np.asarray(xs, np.float64)
        return np.log10(xs) if self._logarithmic else xs

    def _ticks(self, y_limits: tuple[float, float]) -> dict[float, str]:
        """Places on the y axis, and what is written there."""
        if self._y_names:
            return dict(enumerate(self._y_names))
        return {tick: style.number(tick) for tick in style.ticks(*y_limits)}

    def _x_ticks(self) -> dict[float, str]:
        low, high = self._shown[0]
        if not self._logarithmic:
            found = style.ticks(low, high)
            found = [tick for tick in found if tick == round(tick)] if self._whole else found
            return {tick: style.number(tick) for tick in found}
        powers = range(int(np.floor(low)), int(np.ceil(high)) + 1)
        steps = (1, 2, 5) if high - low < 3 else (1,)
        found = {
            np.log10(k) + power: style.number(k * 10.0**power) for power in powers for k in steps
        }
        return {place: name for place, name in found.items() if low <= place <= high}

    def _axes(self, image: Image.Image, y_ticks: dict[float, str]) -> None:
        pen, (left, top, right, bottom) = ImageDraw.Draw(image), self._box
        for tick, name in self._x_ticks().items():
            (column, _) = self._at(tick, self._shown[1][0])
            pen.line((column, top, column, bottom), "#e4e4e4", SCALE)
            style.write(image, (column, bottom + GAP // 2), name, anchor="ma")
        for tick, name in y_ticks.items():
            (_, row) = self._at(self._shown[0][0], tick)
            pen.line((left, row, right, row), "#e4e4e4", SCALE)
            style.write(image, (left - GAP // 2, row), name, anchor="rm")
        pen.rectangle(self._box, None, "#606060", SCALE)
        middle = ((left + right) / 2, bottom + GAP + LETTER + GAP // 2)
        style.write(image, middle, self._x_name, anchor="ma")
        style.write_upwards(image, (GAP + LETTER / 2, (top + bottom) / 2), self._y_name)

    def _draw(self, image: Image.Image) -> None:
        """All marks, none outside of the axes, bands below the others."""
        left, top, right, bottom = self._box
        inside = image.crop(self._box)
        pen = ImageDraw.Draw(inside, "RGBA")
        for mark in sorted(self._marks, key=lambda mark: ("band", "line", "dots").index(mark.kind)):
            points = self._places(mark.xs, mark.ys) - (left, top)
            if mark.kind == "band":
                tops = self._places(mark.xs, mark.tops) - (left, top)
                for part in _finite(np.hstack([points, tops])):
                    outline = np.concatenate([part[:, :2], part[::-1, 2:]])
                    if len(part) > 1:
                        pen.polygon([tuple(p) for p in outline], mark.colour + "38")
            for part in _finite(points):
                if mark.kind == "line":
                    line = [tuple(p) for p in part]
                    pen.line(line, mark.colour, mark.width * SCALE, joint="curve")
                    if len(part) == 1:
                        _dot(pen, part[0], 4 * SCALE, mark.colour)
                for x, y in part if mark.kind == "dots" else ():
                    _dot(pen, (x, y), mark.width * SCALE, mark.colour)
        for x, y, text, colour in self._notes:
            column, row = self._at(float(self._scaled([x])[0]), y)
            fits = column + GAP + style.width(text) < right
            at = (column - left + (GAP if fits else -GAP), row - top)
            pen.text(at, text, colour, style.font(), "lm" if fits else "rm")
        image.paste(inside, (left, top))
        ImageDraw.Draw(image).rectangle(self._box, None, "#606060", SCALE)

    def _places(self, xs: np.ndarray, ys: np.ndarray) -> np.ndarray:
        left, top, right, bottom = self._box
        (x_low, x_high), (y_low, y_high) = self._shown
        columns = left + (xs - x_low) / (x_high - x_low) * (right - left)
        rows = bottom - (ys - y_low) / (y_high - y_low) * (bottom - top)
        return np.stack([columns, rows], axis=-1)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        return tuple(self._places(np.array([x]), np.array([y]))[0])


def _pale(colour: str) -> str:
    """A colour as bands show it on white."""
    parts = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{255 - (255 - part) * 0x38 // 255:02x}" for part in parts)


def _dot(pen: ImageDraw.ImageDraw, at, radius: int, colour: str) -> None:
    x, y = at
    pen.ellipse((x - radius, y - radius, x + radius, y + radius), colour)


def _finite(points: np.ndarray) -> list[np.ndarray]:
    """The stretches of rows that are finite."""
    good = np.isfinite(points).all(axis=1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], good, [False]]).astype(int)))
    return [points[a:b] for a, b in zip(edges[::2], edges[1::2], strict=True)]
