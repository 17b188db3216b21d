"""How models are compared: by one metric and its direction. An evaluator declares its metrics and their directions
(`contract`); `Suite.metric_order` finds the metric of a run.
"""

import dataclasses
import math
from collections.abc import Mapping

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest

DIRECTIONS = {"max": 1.0, "min": -1.0}


@dataclasses.dataclass(frozen=True)
class MetricOrder:
    """The metric by which models are compared.

    Attributes:
      metric: its name, with the evaluator's prefix.
      direction: 'max' if high is good, 'min' if low is.
    """

    metric: str
    direction: str

    def of(self, metrics: Mapping[str, float]) -> float:
        """The metric's value among those that were found. Raises `ConfigError` if it is not there."""
        if self.metric not in metrics:
            raise ConfigError(
                f"config.eval.best: there is no metric {self.metric!r}{nearest(self.metric, metrics)}"
            )
        return metrics[self.metric]

    def score(self, value: float) -> float:
        """A number that is higher for a better value, and lowest for NaN."""
        return rank(DIRECTIONS[self.direction] * value)

    def is_better(self, value: float, other: float | None) -> bool:
        """Whether a value is better than `other`, `None` for no value. One that is not a number never is."""
        if math.isnan(value):
            return False
        return other is None or math.isnan(other) or self.score(value) > self.score(other)

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value is at least as good as `target`."""
        return self.score(value) >= self.score(target)

    def text(self) -> str:
        """The metric and its direction, for people."""
        return f"{self.metric} ({'higher' if self.direction == 'max' else 'lower'} is better)"


def rank(score: float) -> float:
    """The score to sort by, higher is better: NaN sorts last."""
    return -math.inf if math.isnan(score) else score
