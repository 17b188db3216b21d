"""When a run saves by the clock (`checkpoint.every_minutes`). Saves by steps are in the loop."""

import json
import time

from vit_jax.devices import processes


class SaveTimes:
    """Says after which steps so many minutes have passed since the last save; the clock of process 0 decides for all.

    One process asks its clock after each step. Several have to agree, which costs a message: each time they agree
    also on the step after which they ask again, at half of the time that is left.
    """

    def __init__(self, minutes: float, step: int):
        """Counts from `step`; with 0 minutes no save is ever due."""
        self._seconds = 60 * minutes
        self.saved(step)

    def saved(self, step: int) -> None:
        """Notes that the state after `step` is saved."""
        self._saved_at = time.monotonic()
        self._saved_step = step
        self._next = step + 1

    def is_due(self, step: int) -> bool:
        """Whether to save after `step`; all processes ask after the same steps, and get the same answer."""
        if self._seconds <= 0 or step < self._next:
            return False
        passed = time.monotonic() - self._saved_at
        is_due = passed >= self._seconds
        if processes.count() == 1:
            return is_due
        answer = json.dumps([is_due, self._steps_to_wait(step, passed)])
        is_due, wait = json.loads(processes.broadcast_from_first("save by time", answer))
        self._next = step + wait
        return is_due

    def _steps_to_wait(self, step: int, passed: float) -> int:
        """Half of the steps that fit into the time left, and at most as many as since the save: the first steps, which
        are only dispatched, take hardly any time.
        """
        done = step - self._saved_step
        left = max(self._seconds - passed, 0)
        fitting = left / max(passed / done, 1e-6)
        return max(1, min(int(fitting / 2), done))
