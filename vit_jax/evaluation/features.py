"""The features of a whole data set: what few-shot and nearest-neighbour evaluation have in common."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.errors import ConfigError
from vit_jax.data import loader, sources
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.options import Data
from vit_jax.data.record import Source
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import (
    EvalContext,
    EvaluatedModel,
    Evaluator,
    EvaluatorOptions,
    Watch,
)
from vit_jax.evaluation.forward import make_features
from vit_jax.evaluation.gathering import on_host
from vit_jax.models.contract import images_of
from vit_jax.models.registry import Weights

_MADE_UP = 1 << 24  # numbers in the features of a rehearsal: 64 MiB


class Features(NamedTuple):
    """Features of examples, with padding.

    Attributes:
      features: (…, D) float32.
      label: (…) int32, or (…, classes) float32 of examples with several labels.
      mask: (…) float32, 0 for padding.
    """

    features: jax.Array
    label: jax.Array
    mask: jax.Array


class FeatureEvaluator(Evaluator):
    """Base of evaluators of features: they learn from `train_split` and judge on `eval_split`, both
    cropped as for evaluation. A subclass defines `score`, or its own `__call__` if it needs more than the features
    of the examples to judge on, or has them a batch at a time.

    Attributes:
      train, test: the examples to learn from, and to judge on.
    """

    _takes_several_labels = False  # which are rows (classes,) of 0 and 1
    expects = (
        "score(self, features, labels) gets features (n, D) float32 and labels (n,) int32 of all of eval_split, and "
        "returns metrics by name, {'recall': 0.9}"
    )

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        data = self.data()
        self.train = sources.open_source(data, data.train_split)
        self.test = with_classes(sources.open_eval(data), self.train.classes)
        is_multi_label = self.train.multi_label or self.test.multi_label
        if not self.train.classes or (is_multi_label and not self._takes_several_labels):
            raise ConfigError(
                f"config.eval.evaluators: those of features, such as knn, need images with one label each, and "
                f"{data.name!r} ({data.path or 'no path'}) has none: put them into a folder for each class, or set "
                "--config.eval.evaluators=loss"
            )
        self._config = dataclasses.replace(context.config, data=data)
        self._forward = None

    def __call__(
        self, trained: EvaluatedModel, mesh: Mesh, watch: Watch = iter
    ) -> dict[str, float]:
        batches = self.batches(self.test, trained.weights, mesh, watch)
        return self.score(*of_examples(batches, mesh))

    def score(self, features: np.ndarray, labels: np.ndarray) -> dict[str, float]:
        """Metrics by name, of the examples to judge on; computed on the host, by every process.

        Args:
          features: (n, D) float32, the input of the head.
          labels: (n,) int32.
        """
        raise NotImplementedError

    def rehearse(self) -> None:
        from vit_jax.evaluation import rehearsal  # for evaluators of users alone

        super().rehearse()
        data, classes = self._config.data, len(self.train.classes)
        width = rehearsal.check_output(_pooled(self.context, data), self.context, data)
        if type(self).__call__ is FeatureEvaluator.__call__:
            count = max(1, min(len(self.test), _MADE_UP // width))
            features = np.random.default_rng(0).standard_normal((count, width), np.float32)
            labels = (np.arange(count) % classes).astype(np.int32)
            rehearsal.check_metrics(self.score(features, labels), self.metrics())

    def batches(
        self, source: Source, weights: Weights, mesh: Mesh, watch: Watch
    ) -> Iterator[Features]:
        """The features of `source`, a batch (B, …) at a time, sharded over the mesh as batches are."""
        if self._forward is None:
            self._forward = _compiled(self.context, self._config.data, mesh)
        cut = meshes.batch_sharding(mesh)
        with loader.eval_batches(source, self._config, cut) as batches:
            for batch in watch(batches):
                yield Features(
                    self._forward(weights, images_of(batch)), batch["label"], batch["mask"]
                )


def stacked(batches: Iterable[Features], mesh: Mesh) -> Features:
    """All batches as one, (steps, B, …), still sharded over the mesh: no device has them all."""
    stack = _stack(mesh)
    return Features(*(stack(*arrays) for arrays in zip(*batches, strict=True)))


@functools.cache  # so that it is compiled once, not for each evaluation
def _stack(mesh: Mesh) -> Callable:
    sharding = NamedSharding(mesh, P(None, meshes.BATCH))
    return jax.jit(lambda *xs: jnp.stack(xs), out_shardings=sharding)


def of_examples(batches: Iterable[Features], mesh: Mesh) -> tuple[np.ndarray, np.ndarray]:
    """Features (n, D) float32 and labels (n,) of all examples, in their order, in every process."""
    features, label, mask = on_host(batches, mesh)
    real = mask > 0
    return features[real], label[real]


def _compiled(
    context: EvalContext, data: Data, mesh: Mesh
) -> Callable[[Weights, jax.Array], jax.Array]:
    return jax.jit(_pooled(context, data), out_shardings=meshes.batch_sharding(mesh))


def _pooled(context: EvalContext, data: Data) -> Callable[[Weights, jax.Array], jax.Array]:
    """Weights and images (B, H, W, C) uint8 to features (B, D) float32; to be traced."""
    features = make_features(context.definition, context.model_config, data)

    def pooled(weights: Weights, images: jax.Array) -> jax.Array:
        return features(weights, images)[0]

    return pooled
