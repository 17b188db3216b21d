"""Images whose patches and pixels are permuted, in all images alike: what an architecture knows of
images before it learns is lost then (Mixer, arXiv 2105.01601, §4.4).
"""

from typing import TypeVar

import jax
import numpy as np

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data

KINDS = ("patches", "pixels in patches", "both", "all pixels")
Array = TypeVar("Array", np.ndarray, jax.Array)


def check_patches(config_data: Data) -> None:
    """Raises `ConfigError` if images cannot be split into the patches that are to be permuted."""
    size, patch = sizes.height_width(config_data.image_size), config_data.permute_patch
    if config_data.permute in KINDS[:-1] and (size[0] % patch or size[1] % patch):
        raise ConfigError(
            f"config.data.permute = {config_data.permute!r}: images of {sizes.size_text(config_data.image_size)} "
            f"pixels cannot be split into patches of config.data.permute_patch = {patch}"
        )


def permuted(images: Array, patch: int, kind: str, seed: int = 0) -> Array:
    """Images (n, H, W, C) whose patches, or pixels in the patches, or both, or pixels of the whole
    image, are permuted; `kind` is one of `KINDS`, or 'none'.
    """
    n, height, width, channels = images.shape
    if kind == "none":
        return images
    if kind == "all pixels":
        order = np.random.default_rng(seed).permutation(height * width)
        return images.reshape(n, -1, channels)[:, order].reshape(images.shape)
    of_patches, of_pixels = orders(height // patch * (width // patch), patch, kind, seed)
    x = images.reshape(n, height // patch, patch, width // patch, patch, channels)
    x = x.transpose(0, 1, 3, 2, 4, 5).reshape(n, len(of_patches), len(of_pixels), channels)
    x = x[:, of_patches][:, :, of_pixels]
    x = x.reshape(n, height // patch, width // patch, patch, patch, channels)
    return x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape)


def orders(count: int, patch: int, kind: str, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Which patch, and which pixel of a patch, comes where: (count,) and (patch²,)."""
    of_patches, of_pixels = np.arange(count), np.arange(patch * patch)
    if kind in ("patches", "both"):
        of_patches = np.random.default_rng((seed, 0)).permutation(count)
    if kind in ("pixels in patches", "both"):
        of_pixels = np.random.default_rng((seed, 1)).permutation(patch * patch)
    return of_patches, of_pixels
