"""How far a command is: a bar in a terminal, else a line of the log now and then."""

import sys
import time

from absl import logging
from tqdm import tqdm

from vit_jax.base import durations


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
          bar: whether there may be one.
        """
        self._total, self._unit, self._verb = total, unit, done
        self._done = self._made = 0
        self._start = self._logged = time.monotonic()
        self._seconds = every_seconds
        self._bar = tqdm(
            total=total, unit=f" {unit}", smoothing=0.05, dynamic_ncols=True, leave=False,
            disable=not (bar and sys.stderr.isatty()),
        )  # fmt: skip

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def skip(self, count: int) -> None:
        """What an earlier start, or another process, has done: it says nothing of the rate."""
        self._done += count
        self._bar.update(count)

    def update(self, count: int) -> None:
        """What was done just now."""
        self._done, self._made = self._done + count, self._made + count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._logged >= self._seconds and self._done < self._total:
            self._logged = now
            seconds_each = (now - self._start) / self._made
            logging.info(
                "%d of %d %s %s, %.3g a second, %s left",
                self._done, self._total, self._unit, self._verb, 1 / seconds_each,
                durations.duration_text((self._total - self._done) * seconds_each),
            )  # fmt: skip
