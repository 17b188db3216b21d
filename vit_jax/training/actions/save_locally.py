"""Saves the state on the hosts' local disks (`config.checkpoint.local`)."""

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run, is_due


class SaveLocally(Action):
    """Saves every `checkpoint.local_every`."""

    def __init__(self, run: Run):
        self._tier = run.tier
        self._every = run.assembly.to_steps(run.config.checkpoint.local_every)

    def after_step(self, progress: Progress) -> None:
        """Starts to save. After the last step the workdir has the state."""
        if progress.continues and is_due(progress.step, self._every):
            progress.save(self._tier.save)
