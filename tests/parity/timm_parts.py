"""timm's parts as its documentation puts them together, without torchvision, which stands in none of them."""

import functools
import random

import numpy as np
import PIL.Image
import torch

from tests import without_torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@functools.cache
def part(name: str):
    """A module of timm."""
    module = without_torchvision.imported(f"timm.{name}")
    if name == "data.transforms":
        module.F.get_image_size = lambda image: image.size  # all that its crops need of torchvision
    return module


def policy(text: str):
    """A policy of timm by its text, such as 'rand-m9-mstd0.5-inc1', a function of an image of Pillow."""
    policies = part("data.auto_augment")
    # Newer versions of Pillow refuse to keep no bits, and timm asks for it at magnitude 10.
    original = policies.posterize

    def posterize(image, bits_to_keep, **rest):
        if bits_to_keep == 0:
            return PIL.Image.new("RGB", image.size)
        return original(image, bits_to_keep, **rest)

    hparams = {
        "img_mean": tuple(round(255 * m) for m in MEAN),
        "interpolation": PIL.Image.BICUBIC,
    }
    policies.NAME_TO_OP["PosterizeIncreasing"] = posterize
    if text.startswith("rand"):
        return policies.rand_augment_transform(text, hparams)
    return policies.auto_augment_transform(text, hparams)


def cropped(image: PIL.Image.Image, area: tuple[float, float], side: int) -> PIL.Image.Image:
    """A part of the image by timm's draw, at `side` pixels, and half of the time mirrored."""
    crop = part("data.transforms").RandomResizedCropAndInterpolation
    top, left, tall, wide = crop.get_params(image, area, (3 / 4, 4 / 3))
    box = (left, top, left + wide, top + tall)
    return flipped(image.crop(box).resize((side, side), PIL.Image.BICUBIC))


def flipped(image: PIL.Image.Image) -> PIL.Image.Image:
    """The image, half of the time mirrored."""
    return image.transpose(PIL.Image.FLIP_LEFT_RIGHT) if random.random() < 0.5 else image


def prepared(images: list[PIL.Image.Image]) -> torch.Tensor:
    """Images of Pillow -> (n, 3, H, W) float32, normalised."""
    pixels = np.stack([np.asarray(image) for image in images]).astype(np.float32) / 255
    return torch.from_numpy((pixels - np.float32(MEAN)) / np.float32(STD)).permute(0, 3, 1, 2)
