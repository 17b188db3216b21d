"""What is inspected, and what an inspection says."""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from vit_jax.inspection.layout import grid
from vit_jax.inspection.observe import Details, Observed
from vit_jax.models import classifier
from vit_jax.models.registry import Weights


@dataclasses.dataclass
class Subject:
    """A model and the images that it looked at.

    Attributes:
      config: the model's.
      weights: its arrays, as NumPy arrays.
      images: (n, H, W, C) uint8, as the model saw them.
      names: of the images.
      observed: what it did with all of them.
      details: what it did with the first, which are shown.
      classify: images (B, H, W, C) uint8 and other weights to logits, or `None` without a head.
      exits: images to the confidence of every exit (E, n), of a model that has several.
      options: what the user wishes, see `run.Options`.
    """

    config: classifier.Options
    weights: Weights
    images: np.ndarray
    names: list[str]
    observed: Observed
    details: Details
    classify: Callable | None
    exits: Callable | None
    options: Mapping

    @property
    def grid(self) -> tuple[int, int]:
        """Of the patch tokens that the model gives."""
        return grid(self.config)

    @property
    def shown(self) -> int:
        """How many images are shown."""
        return len(self.observed.tokens)


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


def picture_of(image: np.ndarray) -> np.ndarray:
    """(H, W, C) uint8 as RGB; of other channels than three the first, grey."""
    return image if image.shape[-1] == 3 else np.repeat(image[..., :1], 3, axis=-1)
