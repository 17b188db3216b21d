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
from vit_jax.evaluation.contract import EvalContext, Evaluator, EvaluatorOptions, Watch
from vit_jax.evaluation.forward import make_features
from vit_jax.evaluation.gathering import on_host
from vit_jax.models.registry import Weights


class Features(NamedTuple):
    """Features of examples, with padding.

    Attributes:
      features: (…, D) float32.
      label: (…) int32.
      mask: (…) float32, 0 for padding.
    """

    features: jax.Array
    label: jax.Array
    mask: jax.Array


class FeatureEvaluator(Evaluator):
    """Base of evaluators of features: they learn from `train_split` and judge on `eval_split`, both
    cut as for evaluation.
    """

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        data = self.data()
        self.train = sources.open_source(data, data.train_split)
        self.test = with_classes(sources.open_eval(data), self.train.classes)
        if not self.train.classes or self.train.multi_label or self.test.multi_label:
            raise ConfigError(
                f"{type(self).__name__} needs examples with one label each, which {data.name!r} "
                "does not have"
            )
        self._config = dataclasses.replace(context.config, data=data)
        self._forward = None

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
                    self._forward(weights, batch["image"]), batch["label"], batch["mask"]
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
    features = make_features(context.definition, context.model_config, data)

    def pooled(weights: Weights, images: jax.Array) -> jax.Array:
        return features(weights, images)[0]

    return jax.jit(pooled, out_shardings=meshes.batch_sharding(mesh))
