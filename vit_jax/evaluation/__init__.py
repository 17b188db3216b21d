"""How a model is judged. A new evaluator is one module with a class like `Accuracy`, added to
`EVALUATORS`, or registered by a recipe with `register`. It is imported when a run names it.

A run's evaluators are `config.eval.evaluators`; `vit_jax evaluate` takes the same. Metrics are called
PREFIX/METRIC, but those of `accuracy`, `loss` and `segmentation` by their own names.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.base.schema import nearest
from vit_jax.base.settings import named_entries
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel, Evaluator, Watch
from vit_jax.evaluation.metric_order import DIRECTIONS, MetricOrder

EVALUATORS: LazyTable[type[Evaluator]] = LazyTable(
    {
        "accuracy": "vit_jax.evaluation.accuracy:Accuracy",
        "classification": "vit_jax.evaluation.classification:Classification",
        "loss": "vit_jax.evaluation.loss:Loss",
        "few_shot": "vit_jax.evaluation.few_shot:FewShot",
        "knn": "vit_jax.evaluation.neighbours:Neighbours",
        "early_exit": "vit_jax.evaluation.early_exit.evaluator:EarlyExit",
        "patch_sizes": "vit_jax.evaluation.patch_sizes:PatchSizes",
        "imagenet_c": "vit_jax.evaluation.corruptions:Corruptions",
        "retrieval": "vit_jax.evaluation.retrieval:Retrieval",
        "zero_shot": "vit_jax.evaluation.zero_shot:ZeroShot",
        "word_maps": "vit_jax.evaluation.word_maps:WordMaps",
        "segmentation": "vit_jax.evaluation.segmentation:Segmentation",
    }
)
_UNPREFIXED = ("accuracy", "loss", "segmentation")
_SHARES = (
    "accuracy", "accuracy_low", "accuracy_high", "precision", "recall", "f1", "goodput", "mean_average_precision",
)  # fmt: skip


def register(name: str, evaluator: type[Evaluator]) -> None:
    """Adds an evaluator from outside the package."""
    EVALUATORS[name] = evaluator


@dataclasses.dataclass(frozen=True)
class Suite:
    """The evaluators of a run, by the prefix of their metrics; '' for none."""

    evaluators: tuple[tuple[str, Evaluator], ...]

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        """All metrics of a model; see `Evaluator`."""
        all_metrics = {}
        for metrics in self.each(trained, mesh, watch):
            all_metrics |= metrics
        return all_metrics

    def metrics(self) -> list[str] | None:
        """The names of all metrics; `None` if those of an evaluator are not known before it has judged."""
        all_names = []
        for prefix, evaluator in self.evaluators:
            names = evaluator.metrics()
            if names is None:
                return None
            all_names += [f"{prefix}/{name}" if prefix else name for name in names]
        return all_names

    def metric_order(self, best: str) -> MetricOrder:
        """How models are compared by `config.eval.best`: METRIC, METRIC:min or METRIC:max; '': the main metric of
        the first evaluator.

        Raises:
          ConfigError: there is no such metric, or an evaluator does not say which it is, or whether high or low is
            good of it.
        """
        metric, _, direction = best.partition(":")
        metric = metric or self._main_metric()
        names = self.metrics()
        if (names is not None and metric not in names) or (
            ":" in best and direction not in DIRECTIONS
        ):
            raise ConfigError(
                f"config.eval.best = {best!r} is no METRIC, METRIC:min or METRIC:max"
                f"{nearest(metric, names or ())}"
            )
        direction = direction or self._direction(metric)
        if not direction:
            raise ConfigError(
                f"config.eval.best = {best!r}: no evaluator says whether high or low is good of {metric!r}: set "
                f"--config.eval.best={metric}:max or --config.eval.best={metric}:min, or list it in high_is_good or "
                "low_is_good of its evaluator"
            )
        return MetricOrder(metric, direction)

    def _main_metric(self) -> str:
        """That of the first evaluator. Raises `ConfigError` if it has none."""
        prefix, evaluator = self.evaluators[0]
        metric = evaluator.main_metric()
        if not metric:
            names = self.metrics()
            known = f", one of {', '.join(names)}" if names else ""
            raise ConfigError(
                f"config.eval.best = '' means the main metric of the first evaluator, and {prefix or 'that'} names "
                f"none: set --config.eval.best=METRIC:max or METRIC:min{known}"
            )
        return f"{prefix}/{metric}" if prefix else metric

    def _direction(self, metric: str) -> str:
        """Which way is good, as the evaluator with the longest prefix of the metric's name declares it."""
        for prefix, evaluator in sorted(self.evaluators, key=lambda pair: -len(pair[0])):
            if not prefix or metric.startswith(f"{prefix}/"):
                return evaluator.direction(metric.removeprefix(f"{prefix}/") if prefix else metric)
        return ""

    def each(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> Iterator[dict[str, float]]:
        """The metrics of each evaluator, as they come."""
        for prefix, evaluator in self.evaluators:
            metrics = evaluator(trained, mesh, watch)
            yield {f"{prefix}/{n}" if prefix else n: _plain(x) for n, x in metrics.items()}


def make(entries: Sequence, context: EvalContext) -> Suite:
    """The evaluators that `config.eval.evaluators` names.

    Args:
      entries: of each its name, or (name, options); none: the objective's own, or what suits it, accuracy
        where it has labels to learn from, else its loss on held-out examples.

    Raises:
      ConfigError: there is no such evaluator or option, two have the same prefix, or the data does
        not go with the model.
    """
    if not entries:
        objective = objectives.find_objective(context.config.objective)[0]
        usual = "accuracy" if objective.needs_labels or context.networks is None else "loss"
        entries = (objective.evaluator or usual,)
    evaluators = {}
    for name, given in named_entries("eval.evaluators", entries):
        if name not in EVALUATORS:
            raise ConfigError(
                f"config.eval.evaluators: there is no evaluator {name!r}{nearest(name, EVALUATORS)}"
            )
        evaluator = EVALUATORS[name]
        where = f"config.eval.evaluators: {name}"
        options = evaluator.Options(
            **schema.checked_options(evaluator.Options, given, where, f"{where}: ")
        )
        prefix = options.prefix or ("" if name in _UNPREFIXED else name)
        if prefix in evaluators:
            raise ConfigError(
                f"config.eval.evaluators: two have the prefix {prefix!r}; give one another: "
                f"({name!r}, {{'prefix': 'NAME'}})"
            )
        evaluators[prefix] = evaluator(options, context)
    return Suite(tuple(evaluators.items()))


def declared_direction(metric: str) -> str:
    """Which way is good of a metric of a file, 'max' or 'min', as the evaluators of this package declare it; '' if none
    does. Which evaluator has found it is not known: a suite names its parts by their data.
    """
    prefix, _, name = metric.partition("/")
    names = [prefix] if prefix in EVALUATORS else EVALUATORS
    declared = {EVALUATORS[kind].direction(part) for kind in names for part in (metric, name)}
    declared.discard("")
    return declared.pop() if len(declared) == 1 else ""


def is_share(metric: str) -> bool:
    """Whether a metric is between 0 and 1, and written in percent."""
    last = metric.split("/")[-1]
    return last in _SHARES or last.endswith(("accuracy", "shot"))


def _plain(value):
    """A number as Python's own, which JSON takes too."""
    return value.item() if isinstance(value, np.generic | np.ndarray | jax.Array) else value
