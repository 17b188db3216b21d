"""What a server computes: the probabilities of batches of few sizes, all compiled before the first
request, and where the model looks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax import objectives
from vit_jax.base import logs
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.data import crops
from vit_jax.data.options import Data
from vit_jax.evaluation import decisions
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.evaluation.measures import probabilities
from vit_jax.export.engines import make_classifier
from vit_jax.inspection import maps, observe
from vit_jax.inspection.contract import picture_of
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.layout import layouts
from vit_jax.prediction.images import check_one_size


class Network:
    """A classifier on one device.

    Attributes:
      data: how images are cut, the section `config.data`.
      classes: label names.
      thresholds: (classes,), see `config.eval.thresholds`; `None` if the model has none.
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
        self.data, self.classes = data_of(run), tuple(run.classes)
        check_one_size(self.data, "serve")
        self.sizes, self.step, self._model_config = batch_sizes(largest), run.step, run.model_config
        definition, weights = registry.split(run.model)
        self._weights = on_first_device(weights)
        self.thresholds = _thresholds(run)
        self._kind = objectives.probabilities(run.config.objective)
        self._engine = make_classifier(run, engine, precision)
        if self._engine is None:
            forward = make_forward(definition, run.model_config, self.data)
            activation = objectives.activation(run.config.objective)
            classify = jax.jit(lambda weights, images: activation(forward(weights, images).logits))
            self._programs = compile_for_sizes(classify, (self._weights,), self.sizes, self.data)
        self._layout = layouts(run.model_config)["attention"]
        self._look = self._compile_look(run)

    @property
    def has_attention(self) -> bool:
        return self._look is not None

    def classify(self, images: Sequence[np.ndarray]) -> np.ndarray:
        """The probabilities (n, classes) float32 of images (H, W, C) uint8, as many as one of `sizes`."""
        if self._engine is not None:
            logits = self._engine.logits(np.stack(images))
            return probabilities(logits, self._kind).astype(np.float32)
        return np.asarray(self._programs[len(images)](self._weights, np.stack(images)))

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
        self.thresholds = _thresholds(run)
        self.step = run.step

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


def _thresholds(run: TrainedModel) -> np.ndarray | None:
    if not run.config.eval.thresholds:
        return None
    return decisions.class_thresholds(run.config, len(run.classes))


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
