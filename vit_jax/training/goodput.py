"""Where a run's time goes, over all its restarts: how much of it trained, and what took the rest."""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator

from absl import logging
from etils import epath

from vit_jax.base import paths

KINDS = {
    "steps": "training steps that count",
    "compile": "compiling the step",
    "input": "waiting for input",
    "save": "saving",
    "evaluate": "evaluating",
    "start": "starting, up to the first step",
    "lost": "training steps that a restart had to repeat",
    "down": "between a process and the one that went on",
}


class Ledger:
    """Seconds of a run by `KINDS`, kept in WORKDIR/goodput.json by process 0.

    At any time one kind is being counted. What was counted as steps since the checkpoint that a run
    is resumed from is lost. Time from the last entry to the death of a process counts as down.
    """

    def __init__(self, workdir: epath.Path, *, write: bool):
        """Args: write: whether this process keeps the file; all of them count."""
        self._path = workdir / "goodput.json"
        self._write = write
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self._kind, self._since = "start", time.monotonic()
        if write and self._path.exists():
            saved = json.loads(self._path.read_text())
            self.seconds |= saved["seconds"]
            self.seconds["down"] += max(time.time() - saved["written"], 0)

    def resumed_from(self, saved: dict[str, float]) -> None:
        """Args: `seconds` as they were when the checkpoint was saved."""
        for kind in ("steps", "input"):
            lost = max(self.seconds[kind] - saved[kind], 0)
            self.seconds[kind] -= lost
            self.seconds["lost"] += lost

    @contextlib.contextmanager
    def during(self, kind: str) -> Iterator[None]:
        """What is done in here counts as `kind`."""
        before = self._count_as(kind)
        try:
            yield
        finally:
            self._count_as(before)

    def training(self) -> None:
        """From now on everything counts as steps that is nothing else."""
        self._count_as("steps")

    def each(self, items: Iterable, kind: str) -> Iterator:
        """The items; waiting for them counts as `kind`."""
        items = iter(items)
        while True:
            with self.during(kind):
                item = next(items, self)
            if item is self:
                return
            yield item

    def share(self, kind: str = "steps") -> float:
        """Of all the time so far."""
        self._count_as(self._kind)
        return self.seconds[kind] / sum(self.seconds.values())

    def write(self) -> None:
        """Keeps what was counted; a reader never sees half a file."""
        self._count_as(self._kind)
        if self._write:
            entry = json.dumps({"seconds": self.seconds, "written": time.time()})
            try:
                paths.write_whole(self._path, entry + "\n")
            except OSError as error:
                logging.error("%s cannot be written: %s", self._path, error)

    def shares(self) -> dict[str, float]:
        """Every kind's share of the time so far."""
        return {kind: self.share(kind) for kind in KINDS}

    def tell(self) -> None:
        """Says in a line where the time went."""
        told = ", ".join(f"{kind} {share:.1%}" for kind, share in self.shares().items() if share)
        total = sum(self.seconds.values())
        logging.info("of %.0f seconds with all restarts: %s", total, told)

    def _count_as(self, kind: str) -> str:
        now, before = time.monotonic(), self._kind
        self.seconds[before] += now - self._since
        self._kind, self._since = kind, now
        return before
