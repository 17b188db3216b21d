"""Checks the state that devices hold, and the gradients that they compute (`config.audit`)."""

from collections.abc import Sequence

import jax
from absl import logging

from vit_jax.objectives.contract import Batch
from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.audit import CordonHost, WrongState


class CheckDevices(Action):
    """Has devices checked between steps. A run ends when one host is at fault too often."""

    def __init__(self, run: Run):
        self._run = run

    def start(self, progress: Progress) -> None:
        """Marks the state that the run begins with, and says where a run went back to for a damaged one."""
        self._run.checks.start(progress.step, progress.state)
        if isinstance(progress.went_back_for, WrongState) and jax.process_index() == 0:
            step = progress.step
            where = f"to the checkpoint of step {step}" if step else "to the beginning"
            logging.error("%s. Going back %s; no data is skipped", progress.went_back_for, where)

    def compile(self, progress: Progress, batches: Sequence[Batch]) -> None:
        """Has the programs compiled that compute gradients again."""
        self._run.checks.compile(progress.state, batches)

    def before_step(self, progress: Progress) -> None:
        """Has devices checked where that is due after the last step.

        Raises:
          WrongState: the run has to go back.
          CordonHost: a host is at fault too often; the state is saved.
        """
        checks = self._run.checks
        with self._run.clock.waiting():
            progress.state = checks.before(progress.step, progress.state, progress.batch)
        cordon = checks.events.cordon
        if cordon:
            progress.save_now()
            raise CordonHost(f"{cordon}. The state after step {progress.step} is saved")

    def after_step(self, progress: Progress) -> None:
        """Marks the state after a step where a check is due."""
        self._run.checks.after(progress.step, progress.state)
