"""Random changes to training images at sizes of their own, and their normalisation: of patches in place of pixels.

What works on whole images alone is refused by name.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import augment
from vit_jax.data.options import Augment
from vit_jax.models.contract import PatchBatch

_WORK = ("flip",)  # of the random changes
_SWITCHES = (
    "color_jitter", "jitter", "grey", "blur", "solarize", "randaugment_layers", "autoaugment", "three_augment",
    "mixup", "cutmix", "erasing",
)  # fmt: skip


def check_augmentation(config: Augment, where: str) -> None:
    """Raises `ConfigError` if `config.augment` asks for more than flips; `where`: the option that excludes it."""
    for name in _SWITCHES:
        if value := getattr(config, name):
            mixes = (
                "mixes images of one grid"
                if name in ("mixup", "cutmix")
                else "changes whole images"
            )
            raise ConfigError(
                f"{where}: config.augment.{name} = {value} {mixes} alone, and these are patches; set it to "
                f"{type(value)()}"
            )


def augment_patches(
    images: PatchBatch, key: jax.Array, config: Augment, *, channels: int, **normalization
) -> PatchBatch:
    """Flips images and normalises them, with the draws of `augment.augment`.

    Args:
      images: patches uint8.
      key: random key.
      config: the section `config.augment`.
      channels: of the images.
      **normalization: as of `normalize`.
    """
    if config.flip:
        images = flip(images, jax.random.split(key, 5)[0], channels)
    return normalize(images, **normalization)


def normalize(
    images: PatchBatch, mean: Sequence[float], std: Sequence[float], dtype: jax.typing.DTypeLike
) -> PatchBatch:
    """`augment.normalize` of the pixels of patches; mean and std have a number for each channel."""
    shape = images.patches.shape
    pixels = images.patches.reshape(*shape[:2], -1, len(mean))
    return images.replace(patches=augment.normalize(pixels, mean, std, dtype).reshape(shape))


def flip(images: PatchBatch, key: jax.Array, channels: int) -> PatchBatch:
    """Mirrors each image left-right with probability 1/2: its columns of patches, and the pixels of each patch."""
    count, tokens, values = images.patches.shape
    chosen = jax.random.bernoulli(key, shape=(count, 1, 1, 1))[:, 0]  # drawn as `augment.flip` does
    index, columns = jnp.arange(tokens)[None], images.grids[:, 1:]
    mirrored = index // columns * columns + (columns - 1 - index % columns)
    mirrored = jnp.where(index < images.grids.prod(1, keepdims=True), mirrored, index)
    side = round((values // channels) ** 0.5)
    moved = jnp.take_along_axis(images.patches, mirrored[..., None], axis=1)
    moved = moved.reshape(count, tokens, side, side, channels)[:, :, :, ::-1]
    return images.replace(
        patches=jnp.where(chosen, moved.reshape(images.patches.shape), images.patches)
    )
