"""Durations in any unit, as numbers of training steps: '500 steps', '90 epochs', '1e6 examples',
'5%', '10 epochs, at least 300 steps'.

Only `steps` converts between units. `parse` rejects a malformed duration before anything is known
about its run, `normal` gives all spellings of a duration one text, and `duration_text` writes seconds
for people.
"""

import math
import re
from collections.abc import Iterable

from vit_jax.base.errors import ConfigError

_DURATION = re.compile(
    r"\s*(?P<number>\d[\d_]*(?:\.\d+)?(?:e[+-]?\d+)?)\s*(?P<unit>[a-z]*|%)\s*", re.IGNORECASE
)
_MOST = 10**15  # steps
_UNITS = {
    "": "steps", "step": "steps", "steps": "steps", "epoch": "epochs", "epochs": "epochs",
    "example": "examples", "examples": "examples", "%": "%", "percent": "%",
}  # fmt: skip


def steps(
    duration: str | int,
    *,
    batch_size: float,
    examples_per_epoch: int | None,
    total_steps: int | None = None,
    name: str = "",
) -> int:
    """A duration in training steps, rounded to the nearest, and at least 1 unless the duration is
    0.

    >>> steps("90 epochs", batch_size=4096, examples_per_epoch=1_281_167)
    28151

    >>> steps("4 epochs, at least 300 steps", batch_size=64, examples_per_epoch=500)
    300

    Args:
      duration: a number and a unit: steps (or none), epochs, examples, % (of the whole run); or two durations, and
        the longer one is taken: '10 epochs, at least 300 steps'.
      batch_size: examples in a step, on average, over all devices and hosts.
      examples_per_epoch: size of the training set, `None` if unknown.
      total_steps: length of the run, `None` while it is being computed.
      name: of the field that has the duration, for messages.

    Raises:
      ConfigError: it is not a duration, its unit cannot be converted here, or it is longer than any run.
    """
    try:
        return max(
            _steps(part, batch_size, examples_per_epoch, total_steps) for part in _parts(duration)
        )
    except ConfigError as error:
        if not name:
            raise
        raise ConfigError(f"{name} = {error}") from None


def _steps(
    duration: str, batch_size: float, examples_per_epoch: int | None, total_steps: int | None
) -> int:
    number, unit = _number_and_unit(duration)
    if unit == "epochs":
        if examples_per_epoch is None:
            raise ConfigError(
                f"{duration!r}: the size of the training set is not known; set steps or examples"
            )
        number *= examples_per_epoch / batch_size
    elif unit == "examples":
        number /= batch_size
    elif unit == "%":
        if total_steps is None:
            raise ConfigError(
                f"{duration!r}: there is no whole to take a share of; set steps, epochs or examples"
            )
        number *= total_steps / 100
    if number > _MOST:
        raise ConfigError(f"{duration!r} is more than {_MOST:.0e} steps, longer than any run")
    return max(math.floor(number + 0.5), 1) if number else 0


def parse(duration: str | int, name: str = "the duration") -> str:
    """The duration as text. Raises `ConfigError` if it is malformed."""
    try:
        for part in _parts(duration):
            _number_and_unit(part)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None
    return str(duration)


def parse_all(durations: Iterable[str | int], name: str = "the durations") -> tuple[str, ...]:
    """`parse` of several."""
    return tuple(parse(duration, name) for duration in durations)


def normal(duration: str | int) -> str:
    """The one text of all spellings of a duration, to compare two of them.

    >>> normal("40steps"), normal(40), normal("4e1 Steps"), normal("300 step, at least 1 epoch")
    ('40 steps', '40 steps', '40 steps', '1 epochs, at least 300 steps')

    Raises:
      ConfigError: it is not a duration.
    """
    texts = set()
    for part in _parts(duration):
        number, unit = _number_and_unit(part)
        if number:
            text = str(int(number)) if number.is_integer() else repr(number)
            space = "" if unit == "%" else " "
            texts.add(f"{text}{space}{unit}")
    # 0 is the same in all units, and less than any other part.
    return ", at least ".join(sorted(texts)) or "0 steps"


def normal_all(durations: Iterable[str | int]) -> tuple[str, ...]:
    """`normal` of several."""
    return tuple(normal(duration) for duration in durations)


def has_unit(text: str) -> bool:
    """Whether a text is a duration with its unit, such as '40steps' or '5%', and not a plain number."""
    for part in _parts(text):
        match = _DURATION.fullmatch(part)
        unit = match["unit"].lower() if match else ""
        if unit == "" or unit not in _UNITS:
            return False
    return True


def duration_text(seconds: float) -> str:
    """'48 s', '3.2 min', '5.1 h' or '2.5 days'."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    for unit, length, limit in (("min", 60, 6000), ("h", 3600, 172_800)):
        if seconds < limit:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86_400:.3g} days"


def _parts(duration: str | int) -> list[str]:
    """The duration, and the one that it is at least."""
    return str(duration).split(", at least ", 1)


def _number_and_unit(duration: str | int) -> tuple[float, str]:
    match = _DURATION.fullmatch(str(duration))
    number = float(match["number"]) if match else math.inf
    unit = _UNITS.get(match["unit"].lower()) if match else None
    if unit is None or not math.isfinite(number):
        raise ConfigError(
            f"{duration!r} is not a duration; write for example '500 steps', '90 epochs', '1e6 examples' or '5%'"
        )
    return number, unit
