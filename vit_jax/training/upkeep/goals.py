"""How good a run has been so far, by `config.eval.best`, and whether that ends it before its last step: after
too many evaluations without a better one (`eval.patience`), or where the target is reached (`eval.target`).
"""

from typing import Any

from absl import logging

from vit_jax import evaluation
from vit_jax.config import Eval
from vit_jax.training.upkeep.clock import Clock


class Goals:
    """The evaluations of a run as far as they are judged.

    Attributes:
      best: the best of them: `metric`, `value`, `step`, and how many came `since`; `None` before the first.
      reached: the first that reached the target, as written to result.json: `metric`, `value`, `step`,
        `target`, `seconds` since the process was started, whether the run was `restarted`, and where it ran
        (`provenance.describe_process`); `None` before.
    """

    def __init__(self, config: Eval, saved: dict):
        """Continues from what was saved with a checkpoint; of runs that were not saved, {}."""
        self._config = config
        # At the start: a checkout may change while the run continues.
        self._where = {}
        if config.target is not None:
            from vit_jax.training.upkeep import provenance

            self._where = provenance.describe_process()
        self.best: dict[str, Any] | None = saved.get("best")
        reached = saved.get("reached")
        self.reached: dict[str, Any] | None = (
            reached if reached and reached["target"] == config.target else None
        )

    def add(self, step: int, metrics: dict[str, float], clock: Clock) -> bool:
        """Judges the metrics of an evaluation after `step`: whether it is the best so far."""
        metric, sign = evaluation.best_metric(self._config.best, metrics)
        value, target = metrics[metric], self._config.target
        if self.reached is None and target is not None and sign * value >= sign * target:
            from vit_jax.training.upkeep import provenance

            self.reached = {
                "metric": metric,
                "value": value,
                "step": step,
                "target": target,
                "seconds": provenance.process_seconds(),
                "restarted": clock.restarted,
                **self._where,
            }
        if self.best is not None and sign * value <= sign * self.best["value"]:
            self.best = self.best | {"since": self.best["since"] + 1}
            return False
        self.best = {"metric": metric, "value": value, "step": step, "since": 0}
        return True

    def end_the_run(self) -> str:
        """Why the run is to end; '' if it continues."""
        best, patience, reached = self.best, self._config.patience, self.reached
        if reached:
            reason = f"{reached['metric']} {reached['value']:.4g} reaches config.eval.target = {reached['target']:g}"
            logging.info("%s, %.1f s after the start of the process", reason, reached["seconds"])
            return reason
        if patience and best["since"] >= patience:
            reason = f"no better {best['metric']} in {patience} evaluations"
            logging.info(
                "%s: the best is %.4g, of step %d (config.eval.patience)",
                reason,
                best["value"],
                best["step"],
            )
            return reason
        return ""
