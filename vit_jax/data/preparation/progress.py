"""How far `prepare` is: a bar in a terminal, else a line of the log now and then."""

import sys
import time

from absl import logging
from tqdm import tqdm

from vit_jax.base import durations

_SECONDS = 30.0  # between lines


class Progress:
    """Images that are done, of `total`; used in a `with` statement."""

    def __init__(self, total: int, what: str = "prepared"):
        self._total, self._what, self._done = total, what, 0
        self._made, self._start = 0, time.monotonic()
        self._logged = self._start
        shown = sys.stderr.isatty()
        self._bar = tqdm(
            total=total, unit="img", smoothing=0.05, dynamic_ncols=True, disable=not shown
        )

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_) -> None:
        self._bar.close()

    def skip(self, count: int) -> None:
        """Images that an earlier start, or another process, has done: they say nothing of the rate."""
        self._done += count
        self._bar.update(count)

    def update(self, count: int) -> None:
        """Images that were done just now."""
        self._done, self._made = self._done + count, self._made + count
        self._bar.update(count)
        now = time.monotonic()
        if self._bar.disable and now - self._logged >= _SECONDS and self._done < self._total:
            self._logged = now
            rate = self._made / (now - self._start)
            logging.info(
                "%d of %d images %s, %.0f images/s, %s left",
                self._done, self._total, self._what, rate,
                durations.duration_text((self._total - self._done) / rate),
            )  # fmt: skip
