"""Ends a run in which nothing moves any more, so that it can be started again.

A process that is dead is found by the others (`devices/processes.py`); one that lives and waits for ever,
for a disk, a lock or another process, is found here.
"""

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator

from vit_jax.devices import processes


class Watchdog:
    """A thread that ends the process, and with it all others of the run, with exit code 42 when
    `alive` has not been called for long, after saying what every thread is doing.

    Usable as a context manager: it watches inside.
    """

    def __init__(self, step_minutes: float, other_minutes: float):
        """Args: how long a step, and anything else may take; 0: for ever."""
        self._step, self._other = step_minutes, other_minutes
        self._ended = threading.Event()
        self._set("starting", other_minutes)

    def __enter__(self) -> "Watchdog":
        self._thread = threading.Thread(target=self._watch, name="vit_jax-watchdog", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def alive(self, what: str = "a step") -> None:
        """Something has moved; the next is a step."""
        self._set(what, self._step)

    @contextlib.contextmanager
    def during(self, what: str) -> Iterator[None]:
        """What is done in here, such as saving, may take longer than a step."""
        self._set(what, self._other)
        yield
        self.alive()

    def each(self, items: Iterable, what: str) -> Iterator:
        """The items; each of them may take longer than a step."""
        for item in items:
            yield item
            self._set(what, self._other)

    def _set(self, what: str, minutes: float) -> None:
        # One assignment, since another thread reads it.
        self._now = (what, minutes, time.monotonic())

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            what, minutes, since = self._now
            if 0 < minutes * 60 < time.monotonic() - since:
                processes.leave(
                    f"nothing has moved for {minutes:g} minutes in {what}; what every thread is "
                    "doing stands above. Start the run again: it goes on from the last checkpoint",
                    processes.START_AGAIN,
                    stacks=True,
                )
