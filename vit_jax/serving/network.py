"""The computations of a server: probabilities and features of batches of few sizes, all compiled before the first
request, and where the model looks.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax import objectives
from vit_jax.base import logs
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data import crops
from vit_jax.data.options import Data
from vit_jax.evaluation import decisions, measures
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.export.engines import make_classifier
from vit_jax.inspection import maps, observe
from vit_jax.inspection.contract import picture_of
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.layout import layouts
from vit_jax.prediction.images import check_one_size


class ImageAnswer(NamedTuple):
    """The answer of a model to an image.

    Attributes:
      probabilities: (classes,) float32; `None` of a model without head.
      features: (D,) float32, the input of the head.
    """

    probabilities: np.ndarray | None
    features: np.ndarray


class Network:
    """A model that does not segment, on one device.

    Attributes:
      data: how images are cut, the section `config.data`.
      classes: label names; () of a model without head.
      thresholds: (classes,), see `config.eval.thresholds`; `None` if the model has none.
      width: of the features.
      sizes: of the batches that are compiled: powers of two, and the largest.
      step: at which the weights were saved.
      has_attention: whether `look` can be asked: the model attends among all patches.
    """

    def __init__(
        self, run: TrainedModel, largest: int, engine: str = "xla", precision: str = "float32"
    ):
        """Compiles a program for every power of two below `largest`, and for `largest`; or prepares another
        engine, see `engines.make_classifier`.

        Raises:
          ConfigError: it is not known how images are normalised, or the engine cannot have the model.
        """
        self.data = data_of(run)
        self.classes = tuple(run.classes) if run.model_config.num_classes else ()
        check_one_size(self.data, "serve")
        self.sizes, self.step, self._model_config = batch_sizes(largest), run.step, run.model_config
        definition, weights = registry.split(run.model)
        self._weights = on_first_device(weights)
        self.thresholds = decisions.stated_thresholds(run.config, len(run.classes))
        self._kind = objectives.probabilities(run.config.objective)
        self._engine = make_classifier(run, engine, precision)
        forward = make_forward(definition, run.model_config, self.data)
        activation = objectives.activation(run.config.objective)

        @jax.jit
        def answer(weights: registry.Weights, images: jax.Array) -> ImageAnswer:
            output = forward(weights, images)
            probabilities = None if output.logits is None else activation(output.logits)
            return ImageAnswer(probabilities, output.features.astype(jnp.float32))

        shapes = jax.eval_shape(answer, self._weights, _images(1, self.data))
        self.width = shapes.features.shape[-1]
        if self._engine is None:
            self._programs = compile_for_sizes(answer, (self._weights,), self.sizes, self.data)
        self._layout = layouts(run.model_config)["attention"]
        self._look = self._compile_look(run)

    @property
    def has_attention(self) -> bool:
        return self._look is not None

    def answer(self, images: Sequence[np.ndarray]) -> list[ImageAnswer]:
        """The answers to images (H, W, C) uint8, as many as one of `sizes`."""
        probabilities, features = self._compute(np.stack(images))
        if probabilities is None:
            return [ImageAnswer(None, row) for row in features]
        return [ImageAnswer(*rows) for rows in zip(probabilities, features, strict=True)]

    def classify(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """The probabilities (n, classes) float32 of images, see `answer`."""
        return self._compute(np.stack(images)).probabilities

    def look(self, image: np.ndarray) -> np.ndarray:
        """An image (H, W, C) uint8, dark where what the model reads has little of it: attention rollout,
        (H, W, 3) uint8.
        """
        rollout = np.asarray(self._look(self._weights, image[None]))
        return maps.overlay(picture_of(image), rollout.reshape(self._layout.grid))

    def replace(self, run: TrainedModel) -> None:
        """Takes the weights of another checkpoint; batches under way end with the earlier ones.

        Raises:
          ConfigError: it is another model, or has other classes.
        """
        check_same_model(run, self._model_config, self.data, self.classes)
        if self._engine is not None:
            self._engine = make_classifier(run, self._engine.engine, self._engine.precision)
        self._weights = on_first_device(registry.split(run.model)[1])
        self.thresholds = decisions.stated_thresholds(run.config, len(run.classes))
        self.step = run.step

    def _compute(self, images: np.ndarray) -> ImageAnswer:
        """The answers to a batch (B, H, W, C) uint8, arrays (B, …)."""
        if self._engine is None:
            return jax.device_get(self._programs[len(images)](self._weights, images))
        logits, features = self._engine.answers(images)
        return ImageAnswer(measures.probabilities(logits, self._kind).astype(np.float32), features)

    def _compile_look(self, run: TrainedModel) -> jax.stages.Compiled | None:
        """The program for `look`, or `None`."""
        config = observe.for_inspection(run.model_config)
        observed = observe.make_look(registry.abstract(config)[0], config, self.data)
        shapes = jax.eval_shape(observed, self._weights, _images(1, self.data))["found"]
        if "attention.rollout" not in shapes:
            return None

        def rollout(weights: registry.Weights, images: jax.Array) -> jax.Array:
            return observed(weights, images)["found"]["attention.rollout"][-1, 0]

        return jax.jit(rollout).lower(self._weights, _images(1, self.data)).compile()


def check_same_model(
    run: TrainedModel, model_config: ClassifierConfig, data: Data, classes: tuple[str, ...]
) -> None:
    """Raises `ConfigError` if programs that were compiled for a model would not compute the one of `run`."""
    if tuple(run.classes) != classes:
        raise ConfigError("it has other classes: start another server for it")
    if (run.model_config, data_of(run)) != (model_config, data):
        raise ConfigError(
            "it is another model, or its images are prepared otherwise: start another server"
        )


def on_first_device(weights: Any) -> Any:
    """The weights, once they are there: no batch waits for them."""
    return jax.block_until_ready(jax.device_put(weights, jax.devices()[0]))


def batch_sizes(largest: int) -> tuple[int, ...]:
    """Every power of two below `largest`, and `largest`."""
    return (*(2**i for i in range(largest.bit_length()) if 2**i < largest), largest)


def compile_for_sizes(
    function: Callable, weights: tuple, sizes: Sequence[int], data: Data
) -> dict[int, jax.stages.Compiled]:
    """Programs of `function(*weights, images)`, a jitted one, for batches of several sizes."""
    text = ", ".join(map(str, sizes))
    with logs.with_elapsed_time(f"compiling for batches of {text} images"):
        return {n: function.lower(*weights, _images(n, data)).compile() for n in sizes}


def _images(count: int, data: Data) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((count, *crops.shape(data)), np.uint8)
