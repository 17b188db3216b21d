"""Colours, letters and sizes that all pictures share. Drawn at twice the size at which a page shows
them, so that they are sharp in print.
"""

import functools
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SCALE = 2  # pixels drawn for a pixel of the page
LETTER, TITLE = 12 * SCALE, 15 * SCALE
GAP = 8 * SCALE
BLUE, RED, GREY, GREEN = "#1f5fbf", "#c0392b", "#8a8a8a", "#2e8b57"
# Told apart by people who see few colours too: Okabe and Ito's, and the four above.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7a5195", "#444444")
# Dark blue over green to yellow, and blue over white to red: readable in grey as well.
_ANCHORS = {
    "sequential": ("#440154", "#443983", "#31688e", "#21918c", "#35b779", "#90d743", "#fde725"),
    "diverging": ("#2166ac", "#92c5de", "#f7f7f7", "#f4a582", "#b2182b"),
}


@functools.cache
def font(size: int = LETTER) -> ImageFont.FreeTypeFont:
    """Pillow's own letters, of this height in pixels."""
    return ImageFont.load_default(size=size)


def width(text: str, size: int = LETTER) -> int:
    """Of the longest line of a text, in pixels."""
    return max((int(font(size).getlength(line)) + 1 for line in text.split("\n")), default=0)


def write(
    image: Image.Image, at: tuple[float, float], text: str, *, size: int = LETTER, anchor: str = "la",
    colour: str = "black",
) -> None:  # fmt: skip
    """A line of text; `anchor` as Pillow has them."""
    ImageDraw.Draw(image).text(at, text, colour, font(size), anchor)


def write_upwards(image: Image.Image, centre: tuple[float, float], text: str) -> None:
    """A line of text from below upwards, around a point."""
    layer = Image.new("RGB", (width(text) + 4, LETTER + LETTER // 2), "white")
    write(layer, (2, 0), text)
    layer = layer.rotate(90, expand=True)
    corner = (int(centre[0] - layer.width / 2), int(centre[1] - layer.height / 2))
    image.paste(layer, corner)


def shorten(text: str, space: float, size: int = LETTER) -> str:
    """The beginning of a text that fits into so many pixels."""
    if width(text, size) <= space:
        return text
    while text and width(text + "…", size) > space:
        text = text[:-1]
    return text + "…"


def wrapped(text: str, space: float, size: int = LETTER) -> list[str]:
    """The lines of a text, none longer than so many pixels unless a word is."""
    lines: list[str] = []
    for word in text.split():
        if lines and width(f"{lines[-1]} {word}", size) <= space:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    return lines


def coloured(values: np.ndarray, low: float, high: float, scheme: str = "sequential") -> np.ndarray:
    """Numbers (…) as colours (…, 3) uint8 of `low` to `high`; what is not finite is grey."""
    anchors = np.array([[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in _ANCHORS[scheme]])
    values = np.asarray(values, np.float64)
    finite = np.isfinite(values)
    share = np.where(finite, values - low, 0) / ((high - low) or 1.0)
    place = np.clip(share, 0, 1) * (len(anchors) - 1)
    below = np.minimum(place.astype(int), len(anchors) - 2)
    part = (place - below)[..., None]
    colours = anchors[below] * (1 - part) + anchors[below + 1] * part
    return np.where(finite[..., None], colours, 128).round().astype(np.uint8)


def limits(values: Sequence[float]) -> tuple[float, float]:
    """The smallest and the largest of those that are finite; around a single one, room."""
    values = np.asarray(values, np.float64)
    values = values[np.isfinite(values)]
    if not values.size:
        return 0.0, 1.0
    low, high = float(values.min()), float(values.max())
    if low < high:
        return low, high
    return (0.0, 2 * low or 1.0) if low >= 0 else (2 * low, 0.0)


def step(span: float, count: int = 6) -> float:
    """A round distance of ticks: 1, 2 or 5 times a power of ten, about `count` over a span."""
    power = 10.0 ** np.floor(np.log10(span / count))
    return float(power * min((1, 2, 5, 10), key=lambda k: abs(np.log(span / count / (power * k)))))


def ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers between two."""
    apart = step(high - low, count)
    first = int(np.ceil(low / apart - 1e-9))
    return [round(apart * n, 12) for n in range(first, int(np.floor(high / apart + 1e-9)) + 1)]


def number(value: float) -> str:
    """As short as ticks need it: 1.2M, 20k, 0.05."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= unit:
            return f"{value / (1e3 if name == 'k' else unit):.4g}{name}"
    return f"{value:.4g}"
