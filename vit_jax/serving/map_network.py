"""What a server computes of a model that segments: the windows of images, in batches of few sizes, all compiled before
the first request.
"""

from collections.abc import Sequence

import jax
import numpy as np

from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.evaluation import maps
from vit_jax.prediction.maps import Segmented, Segmenter
from vit_jax.serving.network import (
    batch_sizes,
    check_same_model,
    compile_for_sizes,
    on_first_device,
)

MOST_PIXELS = 2**22  # of a mask; larger images are made smaller before
_NAME = "sent"


class MapNetwork:
    """A model that segments, on one device.

    Attributes:
      data: how images are normalised, the section `config.data`.
      classes: label names.
      sizes: of the batches that are compiled.
      step: at which the weights were saved.
      finds_things: whether single things are found too.
    """

    def __init__(self, run: TrainedModel, largest: int):
        """Compiles a program for every power of two below `largest`, and for `largest`.

        Raises:
          ConfigError: it is not known how images are normalised.
        """
        self._segmenter = Segmenter(run)
        self.data, self.classes = self._segmenter.data, tuple(run.classes)
        self.finds_things, self.sizes = bool(self._segmenter.things), batch_sizes(largest)
        self._weights = on_first_device(self._segmenter.weights)
        self.step, self._model_config = run.step, run.model_config
        answers = self._segmenter.answers
        self._programs = compile_for_sizes(answers, self._weights, self.sizes, self.data)

    def answer(self, windows: Sequence[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
        """What the model answers to windows (H, W, C) uint8, as many as one of `sizes`."""
        answers = self._programs[len(windows)](*self._weights, np.stack(windows))
        return list(zip(*jax.device_get(answers), strict=True))

    def replace(self, run: TrainedModel) -> None:
        """Takes the weights of another checkpoint of the same model; batches under way end with the earlier ones."""
        check_same_model(run, self._model_config, self.data, self.classes)
        self._weights = on_first_device(Segmenter(run).weights)
        self.step = run.step

    def cut(self, pixels: np.ndarray) -> maps.Windows:
        """What the model sees of an image (H, W, C) uint8. Raises `TooLarge` if that is too much."""
        return self._segmenter.cut(pixels, _NAME)

    def join(self, image: np.ndarray, cut: maps.Windows, answers: Sequence[tuple]) -> Segmented:
        """An image with its classes, by what the model answered to each of its windows."""
        return self._segmenter.join(_NAME, image, cut, answers)
