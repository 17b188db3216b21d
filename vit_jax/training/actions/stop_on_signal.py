"""Stops a run where a signal asks for that."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run


class StopOnSignal(Action):
    """Asks after each step whether to stop."""

    def __init__(self, run: Run):
        self._run = run

    def after_step(self, progress: Progress) -> None:
        """Stops the run in all processes after the same step, if a signal came to one of them."""
        progress.is_stopped = self._run.stop.after_step()
