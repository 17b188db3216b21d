"""3-Augment, of DeiT III: each image becomes grey, or solarised, or blurred.

The flip before it and the colour jitter after it are in `augment.py`.
"""

import jax
import jax.numpy as jnp

from vit_jax.data.augmentation.randaugment import solarize

SOLARIZE_FROM = 128
BLUR = (0.1, 2.0)  # standard deviation in pixels
_REACH = 6  # three standard deviations of the widest blur


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
    sigma = jax.random.uniform(blur_key, images.shape[:1], minval=BLUR[0], maxval=BLUR[1])
    solarized = solarize(images, SOLARIZE_FROM)
    return jnp.where(
        which == 0, grey(images), jnp.where(which == 1, solarized, gaussian_blur(images, sigma))
    )


def grey(images: jax.Array) -> jax.Array:
    """(B, H, W, 3) uint8 -> (B, H, W, 1) uint8: luma to the nearest level, as Pillow's mode L, bit by
    bit.
    """
    weights = jnp.array((19595, 38470, 7471), jnp.int32)  # BT.601 times 2^16
    luma = jnp.sum(images.astype(jnp.int32) * weights, -1, keepdims=True)
    return ((luma + 2**15) >> 16).astype(jnp.uint8)


def gaussian_blur(images: jax.Array, sigma: jax.Array) -> jax.Array:
    """Blurs each image (B, H, W, C) uint8 with its standard deviation `sigma` (B,), at most 2
    pixels; the border continues outwards.

    Pillow's, which DeiT III uses, comes near a Gaussian by three box blurs; this is the Gaussian.
    """
    taps = jnp.arange(-_REACH, _REACH + 1)
    weights = jnp.exp(-0.5 * (taps / sigma[:, None]) ** 2)
    weights = (weights / weights.sum(1, keepdims=True)).T[..., None, None, None]  # (taps, B, …)
    values = images.astype(jnp.float32)
    for axis in (1, 2):
        side = values.shape[axis]
        pad = [(_REACH, _REACH) if a == axis else (0, 0) for a in range(4)]
        padded = jnp.pad(values, pad, mode="edge")
        values = sum(
            weight * jax.lax.slice_in_dim(padded, tap, tap + side, axis=axis)
            for tap, weight in enumerate(weights)
        )
    return jnp.floor(values + 0.5).astype(jnp.uint8)
