"""Stops a run where a signal asks for that."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.verdicts import StopHere


class StopOnSignal(Action):
    """Asks after each step whether to stop."""

    def __init__(self, run: Run):
        self._run = run

    def after_step(self, progress: Progress) -> None:
        """Raises `StopHere` in all processes after the same step, if a signal came to one of them."""
        if self._run.stop.after_step():
            raise StopHere
