"""The clock of a run: how its time is spent, over all its restarts, and whether it makes progress.

At any time a run does one kind of work, and the clock counts the seconds of each kind. It ends a run that has made no
progress for too long, so that it can be started again. (The other processes find a process that is dead, see
`devices/processes.py`; the clock finds one that lives and waits forever, for a disk, a lock or another process.)
"""

import contextlib
import json
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import jax
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.config import Hosts
from vit_jax.devices import processes

KINDS = {
    "steps": "productive steps",
    "compile": "compiling",
    "input": "waiting for input",
    "save": "saving",
    "evaluate": "evaluating",
    "start": "start-up",
    "lost": "steps repeated after restarts",
    "down": "between a process and its restart",
}
_MOVING = ("steps", "input")  # kinds that may take `step_minutes`; all other kinds `other_minutes`


class Clock:
    """Seconds of a run by `KINDS`, kept in WORKDIR/goodput.json by one process.

    Time that was counted as steps after the checkpoint that a run is resumed from counts as lost. Time from the last
    entry to the death of a process counts as down. As a context manager, it watches inside: when nothing has moved
    for long, it logs the stacks of all threads and ends all processes of the run with exit code 42.

    Attributes:
      seconds: by kind, up to the last change.
      waited: seconds that this process's loop waited for devices or other processes; the rest of the kinds 'steps'
        and 'input' is the work of its host.
    """

    def __init__(self, workdir: epath.Path, hosts: Hosts, *, write: bool):
        """Continues from the file of an earlier start, if there is one.

        Args:
          write: whether this process keeps the file; all of them count.
        """
        self._path = workdir / "goodput.json"
        self._write = write
        self._minutes = {kind: hosts.step_minutes for kind in _MOVING}
        self._other_minutes = hosts.other_minutes
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.waited = 0.0
        self._began = time.monotonic()
        self._before = 0.0
        self._kind = "start"
        self._since = self._began
        self._moved = ("start", self._began)
        self._ended = threading.Event()
        saved = places.read_json(self._path) if write else None
        if saved and {"seconds", "written"} <= saved.keys():
            self.seconds |= saved["seconds"]
            self.seconds["down"] += max(time.time() - saved["written"], 0)

    def __enter__(self) -> "Clock":
        self._thread = threading.Thread(target=self._watch, name="vit_jax-clock", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._ended.set()
        self._thread.join()

    def resumed_from(self, seconds: dict[str, float], training_seconds: float) -> None:
        """Continues from a checkpoint.

        Args:
          seconds: as they were when it was saved.
          training_seconds: as it was then.
        """
        for kind in _MOVING:
            lost = max(self.seconds[kind] - seconds[kind], 0)
            self.seconds[kind] -= lost
            self.seconds["lost"] += lost
        self._before = training_seconds

    @property
    def restarted(self) -> bool:
        """Whether an earlier process of this run counted before."""
        return self.seconds["down"] > 0

    @property
    def training_seconds(self) -> float:
        """Seconds of training, with all that belongs to it, over all restarts."""
        return self._before + time.monotonic() - self._began

    @contextlib.contextmanager
    def during(self, kind: str, after: Any = None) -> Iterator[None]:
        """Counts the time inside as `kind`.

        Args:
          after: arrays that the devices are still working on; waiting for them counts as the kind before.
        """
        with self.waiting():
            jax.block_until_ready(after)
        before = self._count_as(kind)
        try:
            yield
        finally:
            self._count_as(before)

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as `waited`, beside its kind."""
        began = time.monotonic()
        try:
            yield
        finally:
            self.waited += time.monotonic() - began

    def training(self) -> None:
        """Starts to count time as steps, unless it counts as something else."""
        self._count_as("steps")

    def each(self, items: Iterable, kind: str) -> Iterator:
        """The items; waiting for them counts as `kind`, and each of them as a sign of life."""
        items = iter(items)
        while True:
            with self.during(kind):
                item = next(items, self)
            if item is self:
                return
            yield item

    def read(self) -> dict[str, float]:
        """`seconds` up to now."""
        self._count_as(self._kind)
        return dict(self.seconds)

    def shares(self) -> dict[str, float]:
        """Every kind's share of the time so far."""
        seconds = self.read()
        total = sum(seconds.values())
        return {kind: value / total for kind, value in seconds.items()}

    def write(self) -> None:
        """Writes the seconds to the file of the run."""
        seconds = self.read()
        if self._write:
            entry = json.dumps({"seconds": seconds, "written": time.time()})
            try:
                places.write_whole(self._path, entry + "\n")
            except OSError as error:
                logging.error("%s cannot be written: %s", self._path, error)

    def _count_as(self, kind: str) -> str:
        now = time.monotonic()
        before = self._kind
        self.seconds[before] += now - self._since
        self._kind = kind
        self._since = now
        self._moved = (kind, now)  # one assignment, since another thread reads it
        return before

    def _watch(self) -> None:
        while not self._ended.wait(0.5):
            kind, since = self._moved
            minutes = self._minutes.get(kind, self._other_minutes)
            if 0 < minutes * 60 < time.monotonic() - since:
                what = "a step" if kind in _MOVING else KINDS[kind]
                last_opened = list(places.last_opened.items())  # a copy: other threads add to it
                opened = [f"\n  {who}: {file}" for who, file in last_opened]
                files = f" The files that threads opened last:{''.join(opened)}" if opened else ""
                processes.abort_all(
                    f"nothing has moved for {minutes:g} minutes in {what}; what every thread is "
                    f"doing stands above. Start the run again: it continues from the last checkpoint.{files}",
                    processes.START_AGAIN,
                    stacks=True,
                )
