"""How good a run has been so far, by `config.eval.best`, and whether that ends it before its last step: after
too many evaluations without a better one (`eval.patience`), or where the target is reached (`eval.target`).
"""

from typing import Any

import jax
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.reading import BEST_RECORD
from vit_jax.config import Config, Eval
from vit_jax.evaluation import Suite
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.training.upkeep.clock import Clock


def find_metric_order(config: Config, suite: Suite) -> MetricOrder | None:
    """The metric that compares the evaluations of a run; `None` if it is not known and nothing depends on it.

    Raises:
      ConfigError: `config.eval` or `config.checkpoint` asks for the best, and it is not known how to compare.
    """
    judged = config.eval
    ends = judged.patience or judged.target is not None
    is_needed = judged.best or ends or config.checkpoint.best
    try:
        return suite.metric_order(judged.best)
    except ConfigError:
        if is_needed:
            raise
        return None


class Goals:
    """The evaluations of a run as far as they are judged.

    Attributes:
      best: the best of them: `metric`, `direction`, `value`, `step`, and how many came `since`; `None` before the
        first that has a value.
      reached: the first that reached the target, as written to result.json: `metric`, `value`, `step`,
        `target`, `seconds` since the process was started, whether the run was `restarted`, and where it ran
        (`provenance.describe_process`); `None` before.
    """

    def __init__(self, config: Eval, order: MetricOrder | None, saved: dict):
        """Continues from the entry of a checkpoint; {} in a new run.

        An entry of another metric, or for another target, does not count any more.
        """
        self._config = config
        self._order = order
        # At the start: a checkout may change while the run continues.
        self._where = {}
        if self._config.target is not None:
            from vit_jax.training.upkeep import provenance

            self._where = provenance.describe_process()
        self.best: dict[str, Any] | None = None
        self._since = 0
        best = saved.get("best")
        if self._is_of_this_metric(best):
            self.best = best
        if best is None or self.best:
            self._since = saved.get("since", best["since"] if best else 0)
        reached = saved.get("reached")
        self.reached: dict[str, Any] | None = None
        if (
            reached
            and reached["target"] == self._config.target
            and self._is_of_this_metric(reached)
        ):
            self.reached = reached

    def _is_of_this_metric(self, saved: dict | None) -> bool:
        """Whether the saved entry is of the metric that counts now. Earlier versions did not save its direction."""
        now = self._order
        if not saved or now is None:
            return False
        return (now.metric, now.direction) == (
            saved["metric"],
            saved.get("direction", now.direction),
        )

    def saved(self) -> dict[str, Any]:
        """The entry of a checkpoint; `__init__` continues from it."""
        return {
            "best": self.best,
            "reached": self.reached,
            "since": self._since,
            "ended_by_goals": bool(self._reason()),
        }

    def ended_before(self, saved: dict) -> str:
        """The reason why the saved run has ended, by the goals of the config now; '' if it continues. A run that was
        ended by its patience or target continues with more patience or another target. A run that a callback ended
        does not.
        """
        if reason := self._reason():
            return reason
        return "" if saved.get("ended_by_goals") else saved.get("ended", "")

    def log_ended(self, step: int, total_steps: int, reason: str) -> None:
        """Logs why a run is not trained on, and how it would be."""
        advice = "continue from it in another --workdir with --config.init_from"
        if self.reached:
            advice = "set another --config.eval.target"
        elif self._reason():
            advice = f"set --config.eval.patience above {self._since}, or to 0"
        logging.info(
            "this run has ended after step %d of %d: %s. It is evaluated and not trained on; to train on, %s",
            step, total_steps, reason, advice,
        )  # fmt: skip

    def add(self, step: int, metrics: dict[str, float], clock: Clock) -> bool:
        """Judges the metrics of an evaluation after `step`: whether it is the best so far.

        Raises:
          ConfigError: the metric that counts was not found.
        """
        order = self._order
        target = self._config.target
        if order is None:
            return False
        value = order.of(metrics)
        judged = {
            "metric": order.metric,
            "direction": order.direction,
            "value": value,
            "step": step,
        }
        if self.reached is None and target is not None and order.reaches(value, target):
            from vit_jax.training.upkeep import provenance

            self.reached = {
                **judged,
                "target": target,
                "seconds": provenance.process_seconds(),
                "restarted": clock.restarted,
                **self._where,
            }
        if order.is_better(value, self.best and self.best["value"]):
            self._since = 0
            self.best = judged | {"since": 0}
            return True
        self._since += 1
        if self.best:
            self.best = self.best | {"since": self._since}
        return False

    def write_best(self, workdir: epath.Path) -> None:
        """Writes the best evaluation beside the checkpoints, by process 0: the last is made when all are saved."""
        if jax.process_index() == 0:
            places.write_whole(workdir / BEST_RECORD, places.json_text(self.best) + "\n")

    def end_the_run(self) -> str:
        """Why the run is to end, which is logged; '' if it continues."""
        reason = self._reason()
        if not reason:
            return ""
        if self.reached:
            seconds = self.reached["seconds"]
            logging.info("%s, %.1f s after the start of the process", reason, seconds)
            return reason
        best = "all are NaN"
        if self.best:
            best = f"the best is {self.best['value']:.4g}, of step {self.best['step']}"
        logging.info("%s: %s (config.eval.patience)", reason, best)
        return reason

    def _reason(self) -> str:
        patience = self._config.patience
        reached = self.reached
        if reached:
            metric = f"{reached['metric']} {reached['value']:.4g}"
            return f"{metric} reaches config.eval.target = {reached['target']:g}"
        if patience and self._since >= patience:
            return f"no better {self._order.metric} in {patience} evaluations"
        return ""
