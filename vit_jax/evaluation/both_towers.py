"""Vectors of images and of texts, by a model that was trained with the objective image_text: what its evaluators have
in common.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.data import loader
from vit_jax.data.augmentation.augment import prepared
from vit_jax.data.options import Data
from vit_jax.data.record import Source
from vit_jax.data.texts import TextRows, check_vocabulary, open_tokenizer
from vit_jax.devices import meshes
from vit_jax.evaluation.contract import (
    EvalContext,
    EvaluatedModel,
    Evaluator,
    EvaluatorOptions,
    Watch,
)
from vit_jax.evaluation.gathering import on_host
from vit_jax.models import registry
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import Networks


class ImageVectors(NamedTuple):
    """Of all images of a source.

    Attributes:
      vectors: (n, E) float32 of length 1.
      is_read: (n,) bool, which of them could be read.
      labels: (n,) int32; 0 where there are none.
    """

    vectors: np.ndarray
    is_read: np.ndarray
    labels: np.ndarray


class TwoTowerEvaluator(Evaluator):
    """Base of evaluators of images and texts."""

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        networks = context.networks
        if networks is None or not hasattr(networks.objective, "text_vectors"):
            raise ConfigError(
                "config.eval.evaluators: 'retrieval' and 'zero_shot' judge models that were trained with "
                f"config.objective.name='image_text', and this is {context.config.objective.name!r}"
            )
        self.config = dataclasses.replace(context.config, data=self.data())
        own_options = networks.objective.options
        check_vocabulary(own_options, open_tokenizer(own_options.tokenizer))
        self._texts = TextRows(own_options)
        self._compiled = None

    def image_vectors(
        self, source: Source, trained: EvaluatedModel, mesh: Mesh, watch: Watch
    ) -> ImageVectors:
        """Of all images of a source."""
        if not trained.own.params:
            raise ConfigError(
                "config.eval.evaluators: 'retrieval' and 'zero_shot' need the text tower, which an average of "
                "checkpoints has not"
            )
        of_images, _ = self._functions(mesh)

        def batches() -> Iterator[tuple[jax.Array, ...]]:
            cut = meshes.batch_sharding(mesh)
            with loader.eval_batches(source, self.config, cut) as read:
                for batch in watch(read):
                    mask = batch["mask"]
                    vectors = of_images(trained.weights, trained.own, batch["image"])
                    yield vectors, mask, batch.get("label", mask)

        vectors, mask, labels = (x[: len(source)] for x in on_host(batches(), mesh))
        return ImageVectors(vectors, mask > 0, labels.astype(np.int32))

    def text_vectors(
        self, texts: Sequence[str], trained: EvaluatedModel, mesh: Mesh, watch: Watch
    ) -> np.ndarray:
        """Of texts, (n, E) float32."""
        _, of_texts = self._functions(mesh)
        size = self.config.eval.batch_size or self.config.batch_size
        cut = meshes.batch_sharding(mesh)
        rows = loader.local_rows(cut, size, "the evaluation batch size")

        def batches() -> Iterator[tuple[jax.Array]]:
            for first in watch(range(0, len(texts), size)):
                some = [texts[i] if i < len(texts) else "" for i in first + rows]
                tokens = np.stack([self._texts.encode(text) for text in some])
                yield (of_texts(trained.own, jax.make_array_from_process_local_data(cut, tokens)),)

        (vectors,) = on_host(batches(), mesh)
        return vectors[: len(texts)]

    def _functions(self, mesh: Mesh) -> tuple[Callable, Callable]:
        """The two towers, compiled once."""
        if self._compiled is None:
            cut = meshes.batch_sharding(mesh)
            made = _make_towers(self.context, self.config.data)
            of_images, of_texts = (jax.jit(function, out_shardings=cut) for function in made)
            self._compiled = of_images, of_texts
        return self._compiled


def _make_towers(context: EvalContext, data: Data) -> tuple[Callable, Callable]:
    """(weights, own, images uint8) -> vectors, and (own, tokens) -> vectors; to be compiled."""

    def of_images(weights: Weights, own: Weights, images: jax.Array) -> jax.Array:
        networks = context.networks.for_devices()
        model = nnx.merge(registry.abstract(networks.model_config)[0], *weights)
        normalized = prepared(images, data, jnp.dtype(networks.model_config.dtype))
        features = model(normalized).features
        return networks.objective.image_vectors(_modules(networks, own), features)

    def of_texts(own: Weights, tokens: jax.Array) -> jax.Array:
        networks = context.networks.for_devices()
        return networks.objective.text_vectors(_modules(networks, own), tokens)

    return of_images, of_texts


def _modules(networks: Networks, own: Weights) -> nnx.Module:
    """What the objective owns, with its arrays."""
    modules = nnx.eval_shape(lambda: networks.objective.own_modules(registry.Rngs(0)))
    return nnx.merge(registry.split(modules)[0], *own)
