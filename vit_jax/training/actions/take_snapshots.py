"""Writes images as the model sees them, and histograms (`config.log.images`, `config.log.histograms`)."""

from collections.abc import Sequence

import jax

from vit_jax.objectives.contract import Batch
from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.snapshots import Snapshots


class TakeSnapshots(Action):
    """Has snapshots computed before steps, and writes them where metrics are logged."""

    def __init__(self, run: Run):
        self._run = run
        self._snapshots = Snapshots(run.assembly, run.mesh, run.source.classes)

    def compile(self, progress: Progress, batches: Sequence[Batch]) -> None:
        """Compiles for the one shape of batches. Programs for several shapes are compiled at their first use."""
        if len(batches) == 1:
            self._snapshots.compile(progress.state, progress.batch)

    def before_step(self, progress: Progress) -> None:
        """Dispatches the snapshots that are due, from the state before the step."""
        with jax.transfer_guard("disallow"):
            self._snapshots.before(progress.step + 1, progress.state, progress.batch)

    def after_step(self, progress: Progress) -> None:
        """Writes the snapshots since the last log."""
        if self._run.is_logged(progress.step):
            self._snapshots.write(self._run.writers)
