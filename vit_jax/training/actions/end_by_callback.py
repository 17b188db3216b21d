"""Ends a run where a user's callback asks for that, or fails. The metric writers call the callbacks."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.verdicts import EndRun


class EndByCallback(Action):
    """Follows the answers of callbacks, whenever metrics are logged."""

    def __init__(self, run: Run):
        self._run = run

    def after_step(self, progress: Progress) -> None:
        """Raises `EndRun` in all processes. If a callback failed, the state is saved and its error raised."""
        callbacks = self._run.callbacks
        if progress.is_stopped or progress.ended:
            return
        if not self._run.is_logged(progress.step) or not callbacks.end_the_run():
            return
        if callbacks.error:
            progress.save_now()
            callbacks.raise_error()
        if not progress.is_complete:
            raise EndRun(callbacks.ended)

    def end(self, progress: Progress) -> None:
        """Raises the error of a callback that failed at the last evaluation."""
        self._run.callbacks.raise_error()
