"""Compares the evaluations of a run with a curve of earlier runs (`config.reference`)."""

from absl import logging

from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run
from vit_jax.training.upkeep.reference import make_reference


class CompareWithCurve(Action):
    """Says after each evaluation where the run stands, and ends a run that stays too far below the curve."""

    def __init__(self, run: Run):
        """Raises `ConfigError` if the curve cannot be read, or cannot be compared."""
        self._run = run
        self._reference = make_reference(run.assembly, run.source, run.suite)
        self._compared_at = -1

    def start(self, progress: Progress) -> None:
        """Compares an evaluation that was made at the start."""
        self._compare(progress)

    def after_step(self, progress: Progress) -> None:
        """Compares an evaluation that was made after this step."""
        self._compare(progress)

    def end(self, progress: Progress) -> None:
        """Compares the last evaluation."""
        self._compare(progress)

    def _compare(self, progress: Progress) -> None:
        """Raises `BelowReference` if the run is too far below the curve."""
        step = progress.step
        is_new = progress.evaluated_at == step and self._compared_at != step
        if self._reference is None or not is_new:
            return
        self._compared_at = step
        compared = self._reference.compare(step, progress.results)
        writers = self._run.writers
        writers.write_scalars(step, compared.scalars)
        writers.write_texts(step, {"reference": compared.sentence})
        writers.flush()
        logging.info("%s", compared.sentence)
        if compared.error:
            raise compared.error
