"""Split expressions in the notation of TFDS: 'train', 'train[:99%]', 'train[1000:]',
'train[:50]+test'.
"""

import itertools
import math
import re
from collections.abc import Mapping

from vit_jax.base.errors import ConfigError


class SplitError(ConfigError):
    """A split expression names no examples."""


_PART = re.compile(r"(?P<name>[\w.-]+)(\[(?P<start>-?\d+%?)?:(?P<stop>-?\d+%?)?\])?")


def select(
    expression: str, sizes: Mapping[str, int], where: str, aliases: Mapping[str, str] | None = None
) -> list[tuple[str, int, int]]:
    """The parts (split, start, stop) that `expression` names, none of them empty.

    Args:
      expression: splits or slices of them, joined by '+'. Percentages are rounded to the nearest
        example; negative bounds count from the end.
      sizes: the number of examples of every split there is.
      where: the data set, for errors.
      aliases: names that stand for expressions; they hide splits that are called so.

    Raises:
      SplitError: for an unknown or empty split, a slice beyond the end, or a malformed expression.
    """
    aliases = aliases or {}
    parts = []
    for part in expression.replace(" ", "").split("+"):
        match = _PART.fullmatch(part)
        if not match:
            raise SplitError(
                f"split {expression!r} is not of the form 'train', 'train[:99%]' or 'train[10:]+test'"
            )
        name = match["name"]
        if name in aliases:
            whole = select(aliases[name], sizes, where)
        elif name in sizes:
            whole = [(name, 0, sizes[name])]
        else:
            known = ", ".join(dict.fromkeys([*sizes, *aliases]))
            raise SplitError(f"{where} has no split {name!r}; it has: {known}")
        size = sum(stop - start for _, start, stop in whole)
        start = _bound(match["start"], 0, size)
        stop = _bound(match["stop"], size, size)
        if not 0 <= start <= size or not 0 <= stop <= size:
            raise SplitError(
                f"split {part!r} reaches beyond the {size} examples of {name!r} in {where}"
            )
        if start >= stop:
            raise SplitError(
                f"split {part!r} of {where} is empty, of {size} examples; name another, or raise config.data.holdout"
            )
        parts += _cut(whole, start, stop)
    return parts


def _cut(parts: list[tuple[str, int, int]], start: int, stop: int) -> list[tuple[str, int, int]]:
    """The examples `start` to `stop` of `parts` joined."""
    selected = []
    before = 0
    for name, first, last in parts:
        low = max(first, first + start - before)
        high = min(last, first + stop - before)
        if low < high:
            selected.append((name, low, high))
        before += last - first
    return selected


def rest(expression: str) -> str | None:
    """What a slice leaves out of its split; `None` if it is not one slice, or leaves nothing out.

    >>> rest("train[:98%]"), rest("train[100:200]")
    ('train[98%:]', 'train[:100]+train[200:]')
    """
    match = _PART.fullmatch(expression)
    if not match:
        return None
    name = match["name"]
    start = match["start"]
    stop = match["stop"]
    slices = []
    if start:
        slices.append(f"{name}[:{start}]")
    if stop:
        slices.append(f"{name}[{stop}:]")
    return "+".join(slices) or None


def overlap(first: str, other: str) -> bool:
    """Whether two expressions name some of the same examples, as far as that shows without the sizes of splits.

    >>> overlap("train", "train[99%:]"), overlap("train[:99%]", "train[99%:]"), overlap("train", "test")
    (True, False, False)
    """
    pairs = itertools.product(*(text.replace(" ", "").split("+") for text in (first, other)))
    return any(_meet(*map(_PART.fullmatch, pair)) for pair in pairs)


def _meet(first: re.Match | None, other: re.Match | None) -> bool:
    """Whether two parts have examples in common; no, if it depends on the size of their split."""
    if not first or not other or first["name"] != other["name"]:
        return False
    bounds = [match[side] for match in (first, other) for side in ("start", "stop")]
    stated = [bound for bound in bounds if bound]
    same_unit = len({bound.endswith("%") for bound in stated}) < 2
    if not same_unit or any(bound.startswith("-") for bound in stated):
        return first[0] == other[0]
    starts = [int((bound or "0").rstrip("%")) for bound in bounds[::2]]
    stops = [int(bound.rstrip("%")) if bound else math.inf for bound in bounds[1::2]]
    return max(starts) < min(stops)


def _bound(text: str | None, default: int, size: int) -> int:
    if text is None:
        return default
    if text.endswith("%"):
        percent = int(text[:-1])
        value = round(size * percent / 100)
    else:
        value = int(text)
    return size + value if text.startswith("-") else value
