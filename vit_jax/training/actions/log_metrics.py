"""Logs the metrics of steps (`config.log.every`), after it has checked that the steps were good."""

import textwrap
from typing import Any

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.health import BadStep, NonFiniteError
from vit_jax.training.upkeep.progress import Meter


class LogMetrics(Action):
    """Collects the metrics of each step, and writes their means where they are due."""

    def __init__(self, run: Run):
        self._run = run
        self._saved: dict[str, Any] = {}
        self._meter = Meter(run.assembly, len(run.source), run.clock)

    def load_state(self, saved: dict[str, Any]) -> None:
        """Takes the metrics since the last log before the checkpoint."""
        self._saved = saved

    def state(self, progress: Progress) -> dict[str, Any]:
        """The metrics since the last log; waits for the devices."""
        return {"window": self._meter.window(), "window_skipped": self._meter.skipped}

    def start(self, progress: Progress) -> None:
        """Continues from a step. A run that went back for a bad step leaves its data out from now on.

        Raises:
          NonFiniteError: the run went back too often.
        """
        run = self._run
        window = self._saved.get("window", ())
        skipped = self._saved.get("window_skipped")
        self._meter.continue_from(progress.step, run.writers, window, skipped)
        went_back_for = progress.went_back_for
        if went_back_for is None:
            run.writers.write_texts(progress.step, {"config": textwrap.indent(run.recipe, "    ")})
        if isinstance(went_back_for, BadStep):
            config = run.config
            count = run.assembly.to_steps(config.rollback_skip)
            run.skipped_data.add(went_back_for, count, config.max_rollbacks, back_to=progress.step)

    def after_step(self, progress: Progress) -> None:
        """Keeps the metrics of a step, and logs where that is due.

        Raises:
          NonFiniteError: a step was bad.
        """
        run = self._run
        step = progress.step
        self._meter.add(step, progress.metrics)
        if not run.is_logged(step):
            return
        with run.clock.waiting():
            self._check_health(progress)
        self._meter.log(step, progress.batches)
        run.clock.write()

    def _check_health(self, progress: Progress) -> None:
        """Where the run ends, the metrics of its last steps are logged too: they show why."""
        try:
            progress.check_health()
        except NonFiniteError as error:
            goes_back = isinstance(error, BadStep)
            if not goes_back:
                self._meter.log(progress.step, progress.batches, with_skipped=True)
            raise

    def close(self) -> None:
        """Ends the status line."""
        self._meter.close()
