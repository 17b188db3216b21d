"""What `calibration` finds, as a table and as a picture of accuracy over cost."""

from collections.abc import Sequence

import numpy as np
from etils import epath
from PIL import Image, ImageDraw, ImageFont

_SIZE, _SCALE = (760, 480), 2  # pixels; drawn larger and shrunk, which smooths lines
_MARGINS = (70, 20, 20, 60)  # left, top, right, bottom
_BLUE, _RED, _GREY, _GREEN = "#1f5fbf", "#c0392b", "#8a8a8a", "#2e8b57"


def text(result: dict) -> str:
    """The table of `calibration.calibrate`'s result: a row for each exit and for each budget."""
    judged, known = result["judged_on"], result["calibrated_on"]
    rows = [("", "GFLOPs", "accuracy", "geometric", "entropy", "random", "leave", "thresholds")]
    for number, one in enumerate(result["exits"], start=1):
        rows.append((f"exit {number}", f"{one['gflops']:.4g}", f"{one['accuracy']:.2%}"))
    for one in result["budgets"]:
        rivals = (
            "-" if one[n] is None else f"{one[n]:.2%}" for n in ("geometric", "entropy", "random")
        )
        shares = " ".join(f"{share:.0%}" for share in one["shares"])
        values = ",".join(f"{value:.4f}" for value in one["thresholds"])
        name, spent = f"budget {one['budget']:g}", f"{one['gflops']:.4g}"
        rows.append((name, spent, f"{one['accuracy']:.2%}", *rivals, shares, values))
    rows = [(*row, *[""] * (len(rows[0]) - len(row))) for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    lines += [
        "",
        f"Thresholds solved on {known['images']} images of {known['split']}; accuracy and GFLOPs "
        f"(10⁹ multiply-adds an image)",
        f"on the {judged['images']} images of {judged['split']}. geometric: the official code's best "
        "setting within the budget;",
        "entropy: leaving by low entropy; random: by lot, with the same shares.",
    ]
    return "\n".join(lines)


def draw(result: dict, path: epath.PathLike) -> None:
    """A PNG file of accuracy over cost: the official code's settings as a curve, the budgets as dots,
    each exit alone as reference.
    """
    curve = [(one["gflops"], one["accuracy"]) for one in result["geometric"]]
    solved = [(one["gflops"], one["accuracy"]) for one in result["budgets"]]
    alone = [(one["gflops"], one["accuracy"]) for one in result["exits"]]
    rivals = [(one["calibration"]["gflops"], one["random"]) for one in result["budgets"]]
    plot = _Plot([*curve, *solved, *alone, *rivals])
    plot.line(sorted(curve), _BLUE)
    for point in rivals:
        plot.dot(point, _GREY)
    for number, point in enumerate(alone, start=1):
        plot.dot(point, _RED, f"exit {number}")
    for point in solved:
        plot.dot(point, _GREEN)
    plot.legend([
        ("geometric shares", _BLUE), ("solved for a budget", _GREEN),
        ("one exit alone", _RED), ("leaving by lot", _GREY),
    ])  # fmt: skip
    plot.save(path)


class _Plot:
    """Axes that hold all `points` of (GFLOPs, accuracy), with a grid."""

    def __init__(self, points: Sequence[tuple[float, float]]):
        self._image = Image.new("RGB", tuple(_SCALE * side for side in _SIZE), "white")
        self._pen = ImageDraw.Draw(self._image)
        self._font = ImageFont.load_default(size=13 * _SCALE)
        xs, ys = np.array(points).T
        self._x, self._y = (0.0, _end(xs.max(), 0.0)), (max(ys.min() - 0.03, 0), ys.max() + 0.03)
        left, top, right, bottom = _MARGINS
        for x in _ticks(*self._x):
            (column, row) = self._at((x, self._y[0]))
            self._pen.line((column, self._at((x, self._y[1]))[1], column, row), "#e4e4e4", _SCALE)
            self._text((column, row + 8 * _SCALE), f"{x:g}", "ma")
        for y in _ticks(*self._y):
            (column, row) = self._at((0.0, y))
            self._pen.line((column, row, self._at((self._x[1], y))[0], row), "#e4e4e4", _SCALE)
            self._text((column - 8 * _SCALE, row), f"{100 * y:.4g} %", "rm")
        middle = (left + _SIZE[0] - right) / 2 * _SCALE
        below = (_SIZE[1] - bottom + 44) * _SCALE
        self._text((middle, below), "accuracy over GFLOPs (multiply-adds) of an image", "mm")

    def line(self, points: Sequence[tuple[float, float]], colour: str) -> None:
        self._pen.line([self._at(point) for point in points], colour, 2 * _SCALE, joint="curve")

    def dot(self, point: tuple[float, float], colour: str, label: str = "") -> None:
        (column, row), radius = self._at(point), 4 * _SCALE
        self._pen.ellipse((column - radius, row - radius, column + radius, row + radius), colour)
        if label:
            self._text((column, row + 8 * _SCALE), label, "ma", colour)

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        for number, (label, colour) in enumerate(entries):
            row = (_SIZE[1] - _MARGINS[3] - 20 * (len(entries) - number)) * _SCALE
            column = (_SIZE[0] - _MARGINS[2] - 170) * _SCALE
            self._pen.ellipse((column, row - 8, column + 16, row + 8), colour)
            self._text((column + 28, row), label, "lm")

    def save(self, path: epath.PathLike) -> None:
        with epath.Path(path).open("wb") as file:
            self._image.resize(_SIZE, Image.Resampling.LANCZOS).save(file, format="PNG")

    def _at(self, point: tuple[float, float]) -> tuple[float, float]:
        left, top, right, bottom = _MARGINS
        x, y = (
            (value - low) / (high - low)
            for value, (low, high) in zip(point, (self._x, self._y), strict=True)
        )
        column = left + x * (_SIZE[0] - left - right)
        return _SCALE * column, _SCALE * (_SIZE[1] - bottom - y * (_SIZE[1] - top - bottom))

    def _text(self, at: tuple[float, float], text: str, anchor: str, colour: str = "black") -> None:
        self._pen.text(at, text, colour, self._font, anchor)


def _step(span: float) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, about six over a span."""
    power = 10.0 ** np.floor(np.log10(span / 6))
    return float(power * min((1, 2, 5, 10), key=lambda k: abs(np.log(span / 6 / (power * k)))))


def _ticks(low: float, high: float) -> list[float]:
    step = _step(high - low)
    first = int(np.ceil(low / step - 1e-9))
    return [round(step * n, 10) for n in range(first, int(np.floor(high / step + 1e-9)) + 1)]


def _end(high: float, low: float) -> float:
    """The next tick at or above `high`."""
    step = _step(high - low)
    return float(np.ceil(high / step - 1e-9)) * step
