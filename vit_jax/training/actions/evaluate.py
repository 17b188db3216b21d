"""Evaluates a run (`config.eval`), and concludes: which evaluation is the best, and whether the run ends."""

from typing import Any

import jax
from absl import logging

from vit_jax.base import logs
from vit_jax.evaluation.contract import EvaluatedModel
from vit_jax.training import state as states
from vit_jax.training.actions.contract import Action, Progress
from vit_jax.training.run import Run, is_due
from vit_jax.training.state import TrainState
from vit_jax.training.upkeep.goals import Goals, find_metric_order
from vit_jax.training.verdicts import EndRun


class Evaluate(Action):
    """Evaluates every `eval.every`, and at the end of a run."""

    def __init__(self, run: Run):
        """Raises `ConfigError` if the best evaluation is asked for, and it is not known which that is."""
        config = run.config
        self._run = run
        self._every = run.assembly.to_steps(config.eval.every)
        self._gather = states.make_gather(run.like)
        self._order = find_metric_order(config, run.suite)
        if self._order:
            logging.info("evaluations are compared by %s", self._order.text())
        self._goals = Goals(config.eval, self._order, {})
        self._ended_before = ""
        self._was_due = False  # an evaluation, when the checkpoint was saved
        self._started_at = 0

    def load_state(self, saved: dict[str, Any]) -> None:
        """Continues from the evaluations before the checkpoint."""
        self._goals = Goals(self._run.config.eval, self._order, saved)
        self._ended_before = self._goals.ended_before(saved)
        self._was_due = saved.get("evaluation_is_due", False)

    def state(self, progress: Progress) -> dict[str, Any]:
        """The goals, why the run has ended, and whether its next start has to evaluate first."""
        kept = self._goals.saved()
        return kept | {"ended": progress.ended, "evaluation_is_due": self._is_due(progress)}

    def start(self, progress: Progress) -> None:
        """Makes the evaluation that was due where the run was stopped."""
        self._started_at = progress.step
        progress.ended = self._ended_before
        if progress.ended:
            self._goals.log_ended(progress.step, self._run.total_steps, progress.ended)
        best = self._run.config.checkpoint.best and self._goals.best
        self._run.checkpoints.keep_best(best["step"] if best else None)
        if self._was_due and not progress.ended:
            self._evaluate(progress)
            progress.ended = self._goals.end_the_run()
        self._was_due = False

    def after_step(self, progress: Progress) -> None:
        """Raises `EndRun` if the target is reached, or patience has run out."""
        # After the last step the state is saved first: an evaluation may fail.
        if not (progress.continues and is_due(progress.step, self._every)):
            return
        self._evaluate(progress)
        reason = self._goals.end_the_run()
        if reason:
            raise EndRun(reason)

    def end(self, progress: Progress) -> None:
        """Evaluates unless that is done, and adds the conclusions to the result of the run."""
        if progress.evaluated_at != progress.step:
            self._evaluate(progress)
        progress.conclusions["best"] = self._goals.best
        if self._run.config.eval.target is not None:
            progress.conclusions["reached"] = self._goals.reached

    def _is_due(self, progress: Progress) -> bool:
        """Whether the model of this step is still to be evaluated."""
        step = progress.step
        if step == progress.evaluated_at:
            return False
        if step == self._started_at:
            return self._was_due
        return progress.is_complete or bool(progress.ended) or is_due(step, self._every)

    def _evaluate(self, progress: Progress) -> None:
        run = self._run
        step = progress.step
        line = logs.status(jax.process_index() == 0)
        with run.clock.during("evaluate", after=progress.state), line:
            line.show(f"evaluating after step {step:,}")
            results = self._results_of(progress.state)
        progress.evaluated_at = step
        progress.results = results
        run.programs.keep()
        scalars = {f"eval/{name}": value for name, value in results.items()}
        run.writers.write_scalars(step, scalars)
        run.writers.flush()
        if self._goals.add(step, results, run.clock):
            self._note_best(progress)

    def _results_of(self, state: TrainState) -> dict[str, float]:
        run = self._run
        state = self._gather(state)
        trained = EvaluatedModel(state.weights(), state, state.module_weights())
        return run.suite(
            trained, run.mesh, watch=lambda batches: run.clock.each(batches, "evaluate")
        )

    def _note_best(self, progress: Progress) -> None:
        """Writes down that this evaluation is the best, and keeps its checkpoint where the config says so."""
        is_kept = self._run.config.checkpoint.best
        if is_kept:
            progress.save()
        self._goals.write_best(self._run.workdir)
        if is_kept:
            self._run.checkpoints.keep_best(progress.step)
