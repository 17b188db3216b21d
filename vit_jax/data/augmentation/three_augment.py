"""3-Augment, of DeiT III: each image becomes grey, or solarised, or blurred.

The flip before it is in `augment.py`, the colour jitter after it in `color.py`, as are the three changes.
"""

import jax
import jax.numpy as jnp

from vit_jax.data.augmentation.color import SOLARIZE_FROM, blur_sigma, gaussian_blur, grey
from vit_jax.data.augmentation.randaugment import solarize


def three_augment(images: jax.Array, key: jax.Array) -> jax.Array:
    """Changes each image in one of three ways, each as likely (arXiv:2204.07118 §3.2; augment.py in
    the authors' repository).

    Grey; solarised from 128 on; a Gaussian blur, its standard deviation uniform in [0.1, 2] pixels
    whatever the size of the image.

    All three are computed for every image: together they cost less than sorting the images would.

    Args:
      images: (B, H, W, 3) uint8.
      key: random key.

    Returns:
      (B, H, W, 3) uint8.
    """
    which_key, blur_key = jax.random.split(key)
    which = jax.random.randint(which_key, (images.shape[0], 1, 1, 1), 0, 3)
    sigma = blur_sigma(blur_key, len(images))
    solarized = solarize(images, SOLARIZE_FROM)
    return jnp.where(
        which == 0, grey(images), jnp.where(which == 1, solarized, gaussian_blur(images, sigma))
    )
