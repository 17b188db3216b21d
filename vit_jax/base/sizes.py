"""Image sizes: one number for a square, or height × width.

A config says `224`, `"224"` or `"224x448"`; code gets the same in one form: an `int` for a square,
else a tuple (height, width).
"""

import re

from vit_jax.base.errors import ConfigError

Size = int | tuple[int, int]

_TEXT = re.compile(r"(\d+)(?:\s*[x×]\s*(\d+))?")


def parse(size: int | str | tuple[int, int], name: str = "image_size") -> Size:
    """A size in its one form.

    >>> parse("224x448"), parse("224"), parse((384, 384))
    ((224, 448), 224, 384)

    Args:
      size: pixels of a side, "HEIGHTxWIDTH", or (height, width).
      name: its name in errors.

    Raises:
      ConfigError: it is none of these, or not positive.
    """
    sides = size
    if isinstance(size, str):
        match = _TEXT.fullmatch(size.strip())
        sides = [int(side) for side in match.groups() if side] if match else ()
    elif not isinstance(size, tuple | list):
        sides = (size,)
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if len(sides) not in (1, 2) or not whole or min(sides) < 1:
        raise ConfigError(
            f"{name} = {size!r} is no image size: give the pixels of a side, such as 224, or height x "
            "width, such as '224x448'"
        )
    height = sides[0]
    width = sides[-1]
    return height if height == width else (height, width)


def height_width(size: Size) -> tuple[int, int]:
    """(height, width) in pixels."""
    return (size, size) if isinstance(size, int) else size


def size_text(size: Size) -> str:
    """'224' or '224x448'."""
    if isinstance(size, int):
        return str(size)
    height, width = size
    return f"{height}x{width}"
