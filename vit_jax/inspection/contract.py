"""What is inspected, and what an inspection says."""

import dataclasses
from collections.abc import Callable

import numpy as np
from PIL import Image

from vit_jax.inspection.leaving import Leaving
from vit_jax.inspection.observe import Details, Observed
from vit_jax.models import classifier
from vit_jax.models.layout import grid
from vit_jax.models.registry import Weights

NO_ATTENTION = "No meaning here: this model hands out no attention weights."
NEGATIVE = "Layers in which re-attention makes weights negative are skipped: those are no shares."


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """What a user may choose.

    Attributes:
      batch_size: images at a time.
      shown: images of which maps are drawn.
      patch: the place of the patch whose attention is drawn, as shares of height and width.
      thresholds: of early exits; (): 0.8 each.
      flow: whether attention flow is computed.
      map_classes: the classes whose maps are drawn; (): the predicted one of each image.
    """

    batch_size: int = 16
    shown: int = 6
    patch: tuple[float, float] = (0.5, 0.5)
    thresholds: tuple[float, ...] = ()
    flow: bool = False
    map_classes: tuple[str, ...] = ()


@dataclasses.dataclass
class InspectionContext:
    """A model and the images that it looked at.

    Attributes:
      config: the model's.
      weights: its arrays, as NumPy arrays.
      images: (m, H, W, C) uint8, as the model saw them: the first, as many as are shown or fill a batch. No more are
        held, however many there are.
      names: of all images.
      observed: what it did with all of them.
      details: what it did with the first, which are shown.
      classify: images (B, H, W, C) uint8 and other weights to logits, or `None` without a head.
      exits: where all of them leave a model that has several exits.
      options: what the user asked for.
      classes: label names in the order of the logits.
      predicted: the best class of each image that is shown; empty without a head.
      class_maps: images (B, H, W, C) uint8 and numbers of classes (B,) to maps (B, h, w), see `class_maps`; `None` of a
        model that has none.
    """

    config: classifier.ClassifierConfig
    weights: Weights
    images: np.ndarray
    names: list[str]
    observed: Observed
    details: Details
    classify: Callable | None
    exits: Leaving | None
    options: InspectOptions
    classes: tuple[str, ...] = ()
    predicted: tuple[str, ...] = ()
    class_maps: Callable | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Of the patch tokens that the model gives."""
        return grid(self.config)

    @property
    def count(self) -> int:
        """How many images were looked at."""
        return len(self.names)

    @property
    def shown(self) -> int:
        """How many images are shown."""
        return len(self.observed.tokens)

    def caption(self, number: int, *, predicted: str = "") -> str:
        """What stands below an image: its file and, on another line, its predicted class, by default that of the
        last exit.
        """
        predicted = predicted or (self.predicted[number] if self.predicted else "")
        name = self.names[number].rsplit("/", 1)[-1]
        return f"{name}\n{predicted}" if predicted else name


@dataclasses.dataclass
class Section:
    """What one quantity says of a subject.

    Attributes:
      title: of the quantity.
      text: what is seen and how it is read; or why there is nothing to see.
      figures: pictures by the name of their file, without its ending.
      numbers: what was computed, by name.
    """

    title: str
    text: str
    figures: dict[str, Image.Image] = dataclasses.field(default_factory=dict)
    numbers: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the numbers below `count`, from the first to the last."""
    return sorted({round(i) for i in np.linspace(0, count - 1, min(count, most))})


def picture_of(image: np.ndarray) -> np.ndarray:
    """(H, W, C) uint8 as RGB; of other channels than three the first, grey."""
    return image if image.shape[-1] == 3 else np.repeat(image[..., :1], 3, axis=-1)
