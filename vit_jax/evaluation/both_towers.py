"""Vectors of images and of texts, by a model that was trained with the objective image_text: what its evaluators have
in common.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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


class TextProgram:
    """The text tower of a model, compiled once.

    Attributes:
      text: kind of the tower, see `models.text_tower`.
    """

    def __init__(self, networks: Networks | None, judged: str):
        """
        Args:
          networks: those of the model.
          judged: what the objective is called, for messages.

        Raises:
          ConfigError: the model has no text tower, or the tokenizer is another.
        """
        objective, _ = (networks and text_term(networks, None)) or (None, None)
        if objective is None:
            raise ConfigError(
                "texts are compared with images by models that were trained with config.objective.name='image_text', "
                f"or with a sum of it, and this is {judged!r}"
            )
        options = objective.options
        check_vocabulary(options, open_tokenizer(options.tokenizer))
        self.text = options.text
        self.rows, self._networks, self._compiled = TextRows(options), networks, None

    def __call__(
        self,
        texts: Sequence[str],
        module_weights: Weights,
        mesh: Mesh,
        size: int,
        watch: Watch = iter,
    ) -> np.ndarray:
        """Of texts, (n, E) float32 of length 1.

        Args:
          module_weights: arrays of the objective's modules.
          size: texts at a time, on all devices of the mesh.
        """
        cut = meshes.batch_sharding(mesh)
        if self._compiled is None:
            self._compiled = jax.jit(self._vectors, out_shardings=cut)
        rows = loader.local_rows(cut, size, "the evaluation batch size")

        def batches() -> Iterator[tuple[jax.Array]]:
            for first in watch(range(0, len(texts), size)):
                some = [texts[i] if i < len(texts) else "" for i in first + rows]
                tokens = np.stack([self.rows.encode(text) for text in some])
                tokens = jax.make_array_from_process_local_data(cut, tokens)
                yield (self._compiled(module_weights, tokens),)

        (vectors,) = on_host(batches(), mesh)
        return vectors[: len(texts)]

    def _vectors(self, module_weights: Weights, tokens: jax.Array) -> jax.Array:
        objective, modules = text_term(self._networks.for_devices(), module_weights)
        return objective.text_vectors(modules, tokens)


class TwoTowerEvaluator(Evaluator):
    """Base of evaluators of images and texts."""

    def __init__(self, options: EvaluatorOptions, context: EvalContext):
        super().__init__(options, context)
        self.text_program = TextProgram(context.networks, context.config.objective.name)
        self.config = dataclasses.replace(context.config, data=self.data())
        self._image_program = None

    def image_vectors(
        self, source: Source, trained: EvaluatedModel, mesh: Mesh, watch: Watch
    ) -> ImageVectors:
        """Of all images of a source."""
        cut = meshes.batch_sharding(mesh)
        if self._image_program is None:
            made = _make_image_tower(self.context, self.config.data)
            self._image_program = jax.jit(made, out_shardings=cut)
        of_images = self._image_program

        def batches() -> Iterator[tuple[jax.Array, ...]]:
            with loader.eval_batches(source, self.config, cut) as read:
                for batch in watch(read):
                    mask = batch["mask"]
                    vectors = of_images(trained.weights, trained.module_weights, batch["image"])
                    yield vectors, mask, batch.get("label", mask)

        vectors, mask, labels = (x[: len(source)] for x in on_host(batches(), mesh))
        return ImageVectors(vectors, mask > 0, labels.astype(np.int32))

    def text_vectors(
        self, texts: Sequence[str], trained: EvaluatedModel, mesh: Mesh, watch: Watch
    ) -> np.ndarray:
        """Of texts, (n, E) float32."""
        size = self.config.eval.batch_size or self.config.batch_size
        return self.text_program(texts, trained.module_weights, mesh, size, watch)


def _make_image_tower(context: EvalContext, data: Data) -> Callable:
    """(weights, own, images uint8) -> vectors, to be compiled."""

    def of_images(weights: Weights, module_weights: Weights, images: jax.Array) -> jax.Array:
        networks = context.networks.for_devices()
        model = nnx.merge(registry.abstract(networks.model_config)[0], *weights)
        normalized = prepared(images, data, jnp.dtype(networks.model_config.dtype))
        objective, modules = text_term(networks, module_weights)
        return objective.image_vectors(modules, model(normalized))

    return of_images


def text_term(
    networks: Networks, module_weights: Weights | None
) -> tuple[Any, nnx.Module | None] | None:
    """What of the objective compares images with texts, and what it owns, with the arrays `own` if these are there;
    `None` if nothing does. See `ImageText.text_term`.

    Raises:
      ConfigError: there are no such arrays.
    """
    objective = networks.objective
    if not hasattr(objective, "text_term"):
        return None
    if module_weights is None:
        return objective.text_term(None)
    if not module_weights.params:
        raise ConfigError(
            "images are compared with texts by the text tower, which an average of checkpoints has not: name other "
            "evaluators"
        )
    modules = nnx.eval_shape(lambda: objective.make_modules(registry.Rngs(0)))
    return objective.text_term(nnx.merge(registry.split(modules)[0], *module_weights))
