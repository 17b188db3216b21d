"""Images as a model takes them, made one at a time on the host: for the data loader of another library."""

import dataclasses

import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Data
from vit_jax.prediction.images import ImageLike, named_images


@dataclasses.dataclass(frozen=True)
class Transform:
    """An image as a model takes it, cut, resized and normalised as in its evaluation.

    It computes with NumPy alone and can be pickled, so that worker processes of a loader use no devices.

    Attributes:
      data: the section `config.data`.
    """

    data: Data

    def __call__(self, image: ImageLike) -> np.ndarray:
        """(H, W, C) float32 of a path, the bytes of a file, an image of Pillow, or an array.

        Raises:
          BadImage: it cannot be read.
          ConfigError: it is no image, or several.
        """
        named, alone = named_images(image)
        if not alone:
            raise ConfigError("a transform takes one image at a time")
        mean, std = (np.array(x, np.float32) for x in (self.data.mean, self.data.std))
        pixels = (named[0].read(self.data).astype(np.float32) / 255 - mean) / std
        return augment.permuted(pixels[None], self.data)[0]
