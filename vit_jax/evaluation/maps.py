"""From images of any size to the class of every pixel, for a model that segments: what evaluation and
prediction share.

The model takes images of one size. `whole`: the image is squeezed to it. `sliding`: the image is resized until it
just covers that size, and windows that overlap evenly are cut out of it; where they overlap, the mean counts.
Maps of scores are enlarged bilinearly to the image's own size, and the highest score counts.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import option
from vit_jax.base.settings import named_entries
from vit_jax.data.augmentation import augment
from vit_jax.data.decoding import resize
from vit_jax.data.options import Data
from vit_jax.data.record import TooLarge
from vit_jax.evaluation import contract
from vit_jax.models import classifier, layout
from vit_jax.models.registry import Weights
from vit_jax.objectives.networks import OWN, Networks

WINDOWS = ("whole", "sliding")
MOST_WINDOWS = 64  # of an image


_Options = TypeVar("_Options", bound=contract.EvaluatorOptions)


@dataclasses.dataclass(frozen=True)
class MaskOptions(contract.EvaluatorOptions):
    """What the evaluator `segmentation` takes."""

    windows: str = option(
        "whole",
        "what the model sees: the whole image squeezed to its size, or windows that cover it",
        choices=WINDOWS,
    )
    score: float = option(
        0.8,
        "panoptic: a query counts if its class is more probable than this",
        minimum=0,
        below=1,
    )
    overlap: float = option(
        0.8,
        "panoptic: a query counts if it keeps at least this share of its mask, beside the others",
        minimum=0,
        maximum=1,
    )


@dataclasses.dataclass(frozen=True)
class Windows:
    """What the model sees of an image.

    Attributes:
      pixels: (n, H, W, C) uint8.
      places: top and left of each in the resized image.
      size: height and width of that.
      original: those of the image.
    """

    pixels: np.ndarray
    places: tuple[tuple[int, int], ...]
    size: tuple[int, int]
    original: tuple[int, int]

    def labels(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """The class of every pixel of the image, (h, w) uint8, by the scores (h', w', K) of its windows."""
        return enlarged(self._joined(scores), self.original)

    def _joined(self, scores: Sequence[np.ndarray]) -> np.ndarray:
        """The mean of the scores of windows, at their resolution."""
        if len(scores) == 1:
            return scores[0]
        (tall, wide, classes), window = scores[0].shape, self.pixels.shape[1:3]
        shape = self.size[0] * tall // window[0], self.size[1] * wide // window[1]
        total, count = np.zeros((*shape, classes), np.float32), np.zeros((*shape, 1), np.float32)
        for (top, left), map_ in zip(self.places, scores, strict=True):
            row, column = top * tall // window[0], left * wide // window[1]
            place = slice(row, row + tall), slice(column, column + wide)
            total[place] += map_
            count[place] += 1
        return total / count


def cut(pixels: np.ndarray, data: Data, kind: str, grain: int, *, name: str) -> Windows:
    """What the model sees of an image.

    Args:
      pixels: (h, w, C) uint8.
      name: of the image, for errors.
      data: the section `config.data`; its size and interpolation are used.
      kind: one of `WINDOWS`.
      grain: windows lie at multiples of this many pixels, the side of a patch.

    Raises:
      TooLarge: it is so long that the windows would be too many.
    """
    window, original = sizes.height_width(data.image_size), pixels.shape[:2]
    count = count_windows(original, data, kind, grain)
    if count > MOST_WINDOWS:
        height, width = original
        raise TooLarge(
            name,
            f"it is so long, {width} x {height} pixels, that the model sees it in {count} windows, of at most "
            f"{MOST_WINDOWS}: cut it into parts, or squeeze images into one window with windows=whole",
        )
    size = _resized(original, data, kind, grain)
    resized = np.empty((*size, pixels.shape[2]), np.uint8)
    resize.cut_pixels(pixels, ((0, 0, *original), False), resized, data.interpolation)
    places = tuple(itertools.product(*map(_starts, size, window, (grain, grain))))
    tall, wide = window
    cut_out = np.stack([resized[top : top + tall, left : left + wide] for top, left in places])
    return Windows(cut_out, places, size, original)


def count_windows(original: tuple[int, int], data: Data, kind: str, grain: int) -> int:
    """How many windows `cut` takes of an image of a height and a width."""
    size, window = _resized(original, data, kind, grain), sizes.height_width(data.image_size)
    return math.prod(_count(length, side) for length, side in zip(size, window, strict=True))


def enlarged(scores: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """The class with the highest of the scores (h, w, K), enlarged to `size`, (H, W) uint8."""
    best, labels = np.full(size, -np.inf, np.float32), np.zeros(size, np.uint8)
    for label in range(scores.shape[-1]):  # one by one: all at once are large
        of_class = np.ascontiguousarray(scores[..., label])
        scores_of_class = resize.enlarged(of_class, size)
        better = scores_of_class > best
        best[better], labels[better] = scores_of_class[better], label
    return labels


def options_of(evaluators: Sequence, name: str, kind: type[_Options]) -> _Options:
    """How the evaluator of this name makes maps, by `config.eval.evaluators`."""
    entries = named_entries("eval.evaluators", evaluators)
    given = next((options for entry, options in entries if entry == name), {})
    known = {field.name for field in dataclasses.fields(kind)}
    return kind(**{name: given[name] for name in known if name in given})


def check_windows(windows: str, things: tuple[bool, ...]) -> None:
    """Raises `ConfigError` for unknown windows, and for those of a model that finds single things: those of two windows
    cannot be matched.
    """
    if windows not in WINDOWS:
        raise ConfigError(f"windows = {windows!r}: must be {' or '.join(WINDOWS)}")
    if things and windows != "whole":
        raise ConfigError(
            f"windows = {windows!r}: a model that finds single things sees whole images; set windows to 'whole'"
        )


def grain(model_config: classifier.ClassifierConfig) -> int:
    """Where windows may begin: at multiples of a patch's side."""
    return model_config.height_width[0] // layout.grid(model_config)[0]


def make_answers(
    networks: Networks, data: Data
) -> Callable[[Weights, Weights, jax.Array], tuple[jax.Array, ...]]:
    """The forward pass, to be compiled: of the model's arrays, those of what the objective owns, and images
    (B, H, W, C) uint8, to what `Segmentation.answers` says: scores (B, h, w, K) float32 first.
    """

    network = make_map_network(networks)

    def answers(
        weights: Weights, module_weights: Weights, images: jax.Array
    ) -> tuple[jax.Array, ...]:
        dtype = jnp.dtype(networks.for_devices().model_config.dtype)
        return network(weights, module_weights, augment.prepared(images, data, dtype))

    return answers


def make_map_network(
    networks: Networks,
) -> Callable[[Weights, Weights, jax.Array], tuple[jax.Array, ...]]:
    """`make_answers` for images that are normalised already, floats."""

    def network(
        weights: Weights, module_weights: Weights, images: jax.Array
    ) -> tuple[jax.Array, ...]:
        on_devices = networks.for_devices()
        params = {**weights.params, OWN: module_weights.params}
        variables = {"model": weights.variables, OWN: module_weights.variables}
        learner = on_devices.learner(params, variables, step=jnp.int32(0))
        return on_devices.objective.answers(learner, images)

    return network


def _resized(original: tuple[int, int], data: Data, kind: str, grain: int) -> tuple[int, int]:
    """The size that an image is resized to, before windows are cut out of it."""
    window = sizes.height_width(data.image_size)
    if kind == "whole":
        return window
    scale = max(side / length for side, length in zip(window, original, strict=True))
    tall, wide = (
        max(side, grain * round(length * scale / grain))
        for side, length in zip(window, original, strict=True)
    )
    return tall, wide


def _count(length: int, window: int) -> int:
    """How many windows cover a length."""
    return math.ceil(length / window)


def _starts(length: int, window: int, grain: int) -> list[int]:
    """Where windows begin that cover a length with even overlaps, as few as can be."""
    count = _count(length, window)
    room = (length - window) / grain
    return [grain * round(i * room / max(count - 1, 1)) for i in range(count)]
