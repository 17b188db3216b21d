"""How images are prepared for a model with published weights."""

import dataclasses

from vit_jax.base.sizes import Size

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclasses.dataclass(frozen=True)
class Preprocessing:
    """How images are prepared for the model; names and meanings as in `config.data`."""

    image_size: Size
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    eval_crop: str = "resize"
    eval_resize: int = 256
    interpolation: str = "bilinear"


def torchvision_crop(image_size: Size, resized: int) -> Preprocessing:
    """ImageNet's mean and deviation, and the central crop of torchvision's bicubic resize.

    Args:
      resized: the image's shorter side before the crop, pixels.
    """
    return Preprocessing(image_size, IMAGENET_MEAN, IMAGENET_STD, "torchvision", resized, "bicubic")
