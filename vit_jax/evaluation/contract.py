"""What an evaluator is: a judgement of a model as it trains, or of one in a checkpoint."""

import dataclasses
import fnmatch
import inspect
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import checked, nearest, option
from vit_jax.config import Config
from vit_jax.data.options import Data
from vit_jax.data.record import Source
from vit_jax.models import classifier
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import Networks

# What every iterable over batches goes through: progress, signs of life.
Watch = Callable[[Iterable], Iterable]


@dataclasses.dataclass(frozen=True)
class EvalContext:
    """The model that is evaluated, without its weights.

    Attributes:
      config: of its run; `data` says how its images are cut and normalised.
      model_config: the family's config.
      definition: of the model.
      classes: label names in the order of its answers; () for a model without a head.
      networks: with what the objective owns; `None` outside of training, unless the model answers by it.
      logits_of: images (B, H, W, C) uint8, normalised as `config.data` says, to logits (B, classes) float32, computed
        by another engine than XLA with weights of its own; or `None`.
    """

    config: Config
    model_config: classifier.ClassifierConfig
    definition: nnx.GraphDef
    classes: tuple[str, ...]
    networks: Networks | None = None
    logits_of: Callable[[np.ndarray], np.ndarray] | None = None


@dataclasses.dataclass(frozen=True)
class EvaluatedModel:
    """A model with its weights.

    Attributes:
      weights: the averaged ones, if there is an average.
      state: the whole training state, while training; else `None`.
      module_weights: arrays of the objective's modules, averaged too, if the model predicts with them.
    """

    weights: Weights
    state: Any = None
    module_weights: Weights = Weights({}, {})


def _fields(changes: dict | tuple, name: str) -> tuple[tuple[str, Any], ...]:
    """Fields of `config.data` and their values. Raises `ConfigError` for an unknown one."""
    known = {field.name: field for field in dataclasses.fields(Data)}
    changes = dict(changes)
    for field in changes:
        if field not in known:
            raise ConfigError(f"{name}: config.data has no field {field!r}{nearest(field, known)}")
    return tuple((f, checked(f"{name}.{f}", v, known[f])) for f, v in changes.items())


@dataclasses.dataclass(frozen=True)
class EvaluatorOptions:
    """What every evaluator takes; its own options come after these."""

    prefix: str = option("", "before the names of its metrics; '': its name")
    data: tuple = option(
        (), "fields of config.data that are others here: {'name': 'cifar10'}", parse=_fields
    )


class Evaluator:
    """Base of all evaluators. It opens its own data when it is made, before devices are used.

    Attributes:
      Options: its frozen dataclass of options.
      expects: what a subclass has to define, for messages.
      high_is_good, low_is_good: patterns (`*/accuracy`) of the metrics that are good when high, or low. Any other
        metric is compared only where `config.eval.best` says how.
      by_engine: whether it takes logits from `EvalContext.logits_of`, if that is there.
    """

    Options: ClassVar[type] = EvaluatorOptions
    high_is_good: ClassVar[tuple[str, ...]] = ()
    low_is_good: ClassVar[tuple[str, ...]] = ()
    by_engine: ClassVar[bool] = False
    expects: ClassVar[str] = (
        "an evaluator is called as evaluator(trained, mesh, watch) and returns metrics by name, {'recall': 0.9}"
    )

    def __init__(self, options: Any, context: EvalContext):
        """Raises `ConfigError` for options or data that do not go with the model."""
        self.options, self.context = options, context

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        """Judges a model.

        Args:
          trained: its weights, on the mesh.
          mesh: of all devices; set for what is traced.
          watch: wraps every iterable over batches, to show progress and count as a sign of life.

        Returns:
          Metrics by name, the same in all processes.
        """
        raise NotImplementedError

    def rehearse(self) -> None:
        """Before the run, without weights, examples and devices: raises an error of any type for what would fail in
        `__call__`. Base classes trace the model and try what is computed of its outputs. See `rehearsal.rehearse`.
        """
        inspect.signature(self.__call__).bind(None, None, iter)

    def metrics(self) -> tuple[str, ...] | None:
        """The names of its metrics, by which `config.eval.best` is checked before training; `None` if they are known
        only when it has judged.
        """
        return None

    def main_metric(self) -> str:
        """The metric that counts unless `config.eval.best` names one; '' if there is none. By default the one metric
        with a declared direction, if there is exactly one and it is no pattern.
        """
        declared = (*self.high_is_good, *self.low_is_good)
        return declared[0] if len(declared) == 1 and "*" not in declared[0] else ""

    @classmethod
    def direction(cls, metric: str) -> str:
        """'max' if high is good of a metric, 'min' if low is; '' if that is not declared."""
        declared = {"max": cls.high_is_good, "min": cls.low_is_good}
        for direction, patterns in declared.items():
            if any(fnmatch.fnmatchcase(metric, pattern) for pattern in patterns):
                return direction
        return ""

    def data(self) -> Data:
        """The section `data` of the run's config, with what the options change in it."""
        data = dataclasses.replace(self.context.config.data, **dict(self.options.data))
        if data.native_tokens:
            from vit_jax.data import native_sizes

            data = native_sizes.for_model(data, self.context.model_config)
        return data


def held_out(evaluator: Evaluator) -> Source | None:
    """The examples that an evaluator judges on, if it keeps them under the names that the package's
    evaluators use.
    """
    return getattr(evaluator, "source", None) or getattr(evaluator, "test", None)
