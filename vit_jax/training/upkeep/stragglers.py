"""Which host holds up all others: in a step that all devices compute together the slowest decides,
and none of the others can see from its own times which it is.

Each process compares what it does itself with what it waits for: of a slow host the first grows, of
all others the second.
"""

import json
import socket
import statistics

from absl import logging

from vit_jax.devices import processes
from vit_jax.training.upkeep.clock import Clock

# A host is slow if between steps it works this share of a step longer than the median host, and most
# of the step in all: what is less is hidden behind the devices. It is named when that has lasted for
# this many log lines and has cost this many seconds.
_LONGER, _MOST, _LINES, _SECONDS = 0.1, 0.5, 3, 5.0
_KEPT = 5  # log lines that a process posts, for processes that read them later


class Stragglers:
    """Compares the processes of a run at each log step; none waits for another."""

    def __init__(self, clock: Clock):
        """Args: `clock`: of this process."""
        self._clock = clock
        self._before: tuple[int, dict[str, float], float] | None = None
        self._lines: list[dict] = []
        self._compared = 0  # up to this step
        self._lost: dict[int, list[float]] = {}  # seconds by log line in a row, by process
        self._named: set[int] = set()

    def log(self, step: int) -> None:
        """Posts this process's times since the last log step; process 0 compares those of all, and
        names a host that has been slow for long.
        """
        if processes.count() == 1:
            return
        now, before = (step, self._clock.read(), self._clock.waited), self._before
        self._before = now
        if before is None or step <= before[0]:  # after a rollback
            return
        spent = {kind: now[1][kind] - before[1][kind] for kind in ("steps", "input")}
        times = {
            "steps": step - before[0],
            "seconds": sum(spent.values()),
            "host": sum(spent.values()) - (now[2] - before[2]),
            "input": spent["input"],
        }
        self._lines = [*self._lines, {"step": step, **times}][-_KEPT:]
        posted = {"name": socket.gethostname(), "lines": self._lines}
        processes.post("times", json.dumps(posted))
        if processes.index() == 0:
            self._compare({p: json.loads(x) for p, x in processes.posted("times").items()})

    def _compare(self, posted: dict[int, dict]) -> None:
        """Looks at the log steps that all processes have posted."""
        lines = {p: {line["step"]: line for line in post["lines"]} for p, post in posted.items()}
        if len(lines) < processes.count():
            return
        for step in sorted(set.intersection(*map(set, lines.values()))):
            if step > self._compared:
                self._compared = step
                self._compare_line({p: of_step[step] for p, of_step in lines.items()}, posted)

    def _compare_line(self, times: dict[int, dict], posted: dict[int, dict]) -> None:
        median = statistics.median(line["host"] for line in times.values())
        for process, line in times.items():
            longer = line["host"] - median
            slow = longer > _LONGER * line["seconds"] and line["host"] > _MOST * line["seconds"]
            self._lost[process] = [*self._lost.get(process, []), longer] if slow else []
            lost = self._lost[process]
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
