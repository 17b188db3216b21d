"""How far a command is: a line that is drawn again in a terminal, else a line of the log now and then."""

import time

from absl import logging

from vit_jax.base import durations, logs


class Progress:
    """What is done, of `total`; used in a `with` statement."""

    def __init__(
        self, total: int, unit: str, done: str, *, every_seconds: float = 30.0, bar: bool = True
    ):
        """Starts the clock.

        Args:
          unit: what is counted, in the plural.
          done: what becomes of it, as in '3 of 4 images prepared'.
          every_seconds: between lines of the log.
          bar: whether it may be drawn in a terminal.
        """
        self._total, self._unit, self._verb = total, unit, done
        self._done = self._made = 0
        self._start = self._logged = time.monotonic()
        self._seconds = every_seconds
        self._status = logs.status(bar)

    def __enter__(self) -> "Progress":
        self._status.__enter__()
        return self

    def __exit__(self, *_) -> None:
        self._status.__exit__()

    def skip(self, count: int) -> None:
        """What an earlier start, or another process, has done: it says nothing of the rate."""
        self._done += count

    def update(self, count: int) -> None:
        """What was done just now."""
        self._done, self._made = self._done + count, self._made + count
        if self._status.due:
            self._status.show(*self._parts())
        now = time.monotonic()
        if (
            not self._status.shown
            and now - self._logged >= self._seconds
            and self._done < self._total
        ):
            self._logged = now
            logging.info("%s", ", ".join(self._parts()))

    def _parts(self) -> tuple[str, str, str]:
        each = max(time.monotonic() - self._start, 1e-9) / max(self._made, 1)
        left = durations.duration_text((self._total - self._done) * each)
        return (
            f"{self._done} of {self._total} {self._unit} {self._verb}",
            f"{1 / each:.3g} a second",
            f"{left} left",
        )
