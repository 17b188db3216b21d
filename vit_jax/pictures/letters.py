"""Texts in pictures: the font of all of them, DejaVu Sans as matplotlib brings it, and what is written for letters
that it does not have.
"""

import functools
import pathlib
import unicodedata

from PIL import ImageFont


@functools.cache
def font(size: float) -> ImageFont.FreeTypeFont:
    """For Pillow, in pixels."""
    return ImageFont.truetype(str(_path()), size)


def drawable(text: str) -> str:
    """A text of letters that the font has: for an emoji its name, for any other letter its number.

    >>> drawable("grün 🐕 猫")
    'grün [dog] U+732B'
    """
    return "".join(
        c if ord(c) in _letters() or c == "\n" else _described(c)
        for c in unicodedata.normalize("NFC", text)
    )


def fitted(text: str, size: float, width: float) -> str:
    """A text whose lines are drawn in no more pixels than these; those that are too long end in '…'."""
    lines = (_fitted(line, font(size), width) for line in drawable(text).split("\n"))
    return "\n".join(lines)


def _fitted(line: str, face: ImageFont.FreeTypeFont, width: float) -> str:
    if face.getlength(line) <= width:
        return line
    count = next(
        (n for n in range(len(line), 0, -1) if face.getlength(f"{line[:n].rstrip()}…") <= width), 0
    )
    return f"{line[:count].rstrip()}…"


def _described(letter: str) -> str:
    category = unicodedata.category(letter)
    if category in (
        "Mn",
        "Me",
        "Cf",
    ):  # what changes the letter before it, such as an emoji's colour
        return ""
    name = unicodedata.name(letter, "").lower() if category == "So" else ""
    return f"[{name}]" if name else f"U+{ord(letter):04X}"


def _path() -> pathlib.Path:
    import matplotlib

    return pathlib.Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")


@functools.cache
def _letters() -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(_path())).get_charmap())
