"""Saves the state in the workdir (`config.checkpoint`)."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run, is_due
from vit_jax.training.upkeep.save_times import SaveTimes


class Save(Action):
    """Saves every `checkpoint.every`, and every `checkpoint.every_minutes`."""

    def __init__(self, run: Run):
        self._run = run
        self._every = run.assembly.to_steps(run.config.checkpoint.every)

    def start(self, progress: Progress) -> None:
        """Counts minutes from now on."""
        self._times = SaveTimes(self._run.config.checkpoint.every_minutes, progress.step)

    def after_step(self, progress: Progress) -> None:
        """Starts to save where that is due. The loop itself saves at the end of a run."""
        step = progress.step
        if not progress.continues:
            return
        with self._run.clock.waiting():
            time_has_passed = self._times.is_due(step)
        if is_due(step, self._every) or time_has_passed:
            progress.save()
            self._times.saved(step)
