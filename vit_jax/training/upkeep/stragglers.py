"""Finds a host that holds up the run: the slowest host decides about the time of a step that all devices compute
together, and no other host can see from its own times which host is slow.

Each process measures its own work and its waiting: a slow host works longer, and all other hosts wait longer.
"""

import json
import socket
import statistics
from typing import NamedTuple

from absl import logging

from vit_jax.devices import processes
from vit_jax.training.upkeep.clock import Clock

# A host is slow if between steps it works longer than the median host by the first share of a step, and for the second
# share of the step in all: less work is hidden behind the devices. It is named when that has lasted for this many log
# lines and has cost this many seconds.
_LONGER = 0.1
_MOST = 0.5
_LINES = 3
_SECONDS = 5.0
_KEPT = 5  # log lines that a process posts, for processes that read them later


class _Reading(NamedTuple):
    """The clock at a log step.

    Attributes:
      step: of the run.
      seconds: by kind, see `Clock`.
      waited: seconds of waiting for devices or other processes.
    """

    step: int
    seconds: dict[str, float]
    waited: float


class Stragglers:
    """Compares the processes of a run at each log step; none waits for another."""

    def __init__(self, clock: Clock):
        """Args: `clock`: of this process."""
        self._clock = clock
        self._before: _Reading | None = None
        self._lines: list[dict] = []
        self._compared = 0  # up to this step
        self._lost: dict[int, list[float]] = {}  # seconds by log line in a row, by process
        self._named: set[int] = set()

    def log(self, step: int) -> None:
        """Posts this process's times since the last log step; process 0 compares the times of all processes, and names
        a host that has been slow for long.
        """
        if processes.count() == 1:
            return
        now = _Reading(step, self._clock.read(), self._clock.waited)
        before = self._before
        self._before = now
        if before is None or step <= before.step:  # after a rollback
            return
        on_input = now.seconds["input"] - before.seconds["input"]
        seconds = now.seconds["steps"] - before.seconds["steps"] + on_input
        line = {
            "step": step,
            "steps": step - before.step,
            "seconds": seconds,
            "host": seconds - (now.waited - before.waited),
            "input": on_input,
        }
        self._lines = [*self._lines, line][-_KEPT:]
        own_post = {"name": socket.gethostname(), "lines": self._lines}
        processes.post("times", json.dumps(own_post))
        if processes.index() == 0:
            texts = processes.posted("times")
            posted = {process: json.loads(text) for process, text in texts.items()}
            self._compare(posted)

    def _compare(self, posted: dict[int, dict]) -> None:
        """Looks at the log steps that all processes have posted."""
        lines = {}
        for process, post in posted.items():
            lines[process] = {line["step"]: line for line in post["lines"]}
        if len(lines) < processes.count():
            return
        posted_by_all = set.intersection(*map(set, lines.values()))
        for step in sorted(posted_by_all):
            if step > self._compared:
                self._compared = step
                times = {process: of_step[step] for process, of_step in lines.items()}
                self._compare_line(times, posted)

    def _compare_line(self, times: dict[int, dict], posted: dict[int, dict]) -> None:
        median = statistics.median(line["host"] for line in times.values())
        for process, line in times.items():
            longer = line["host"] - median
            works_longer = longer > _LONGER * line["seconds"]
            works_most = line["host"] > _MOST * line["seconds"]
            lost = self._lost.setdefault(process, [])
            if works_longer and works_most:
                lost.append(longer)
            else:
                lost.clear()
            lasts = len(lost) >= _LINES and sum(lost) > _SECONDS
            if lasts and process not in self._named:
                self._named.add(process)
                logging.warning(
                    "Process %d on %s holds up all others: between steps its host works %.3g s, %.3g s "
                    "of them waiting for input, and the median host %.3g s; a step takes %.3g s. This "
                    "has lasted for %d log lines. Look at its cores, disk and network, or replace it",
                    process, posted[process]["name"], *(
                        seconds / line["steps"]
                        for seconds in (line["host"], line["input"], median, line["seconds"])
                    ), len(lost),
                )  # fmt: skip
