"""Changes of colours: DeiT's colour jitter, of all images; and what DINO and its relatives do to some of
them: jitter, grey, blur, solarise (dinov2/data/augmentations.py).

torchvision draws the order of the jitter's four changes; here it is always brightness, contrast,
saturation, hue. Its blur has nine taps and mirrors the border; this one is `three_augment.gaussian_blur`.
"""

import jax
import jax.numpy as jnp

from vit_jax.data.augmentation.randaugment import GREY, solarize
from vit_jax.data.augmentation.three_augment import BLUR, SOLARIZE_FROM, gaussian_blur, grey
from vit_jax.data.options import Augment


def change_colors(images: jax.Array, key: jax.Array, config: Augment) -> jax.Array:
    """Jitters, greys, blurs and solarises images, each with its own probability, in this order.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      key: random key; each change has a sub-key.
      config: the section `config.augment`.

    Returns:
      The images as they are if there is nothing to change, else uint8: values are rounded after jitter.
    """
    if not (config.jitter or config.grey or config.blur or config.solarize):
        return images
    images = _rounded(images)
    batch = images.shape[0]

    def some(number: int, probability: float, changed) -> jax.Array:
        choose, draw = jax.random.split(jax.random.fold_in(key, number))
        chosen = jax.random.bernoulli(choose, probability, (batch, 1, 1, 1))
        return jnp.where(chosen, changed(images, draw), images)

    if config.jitter:
        jittered = lambda x, draw: _rounded(jitter(x, _factors(draw, batch, config.jitter)))  # noqa: E731
        images = some(0, config.jitter_probability, jittered)
    if config.grey:
        images = some(1, config.grey, lambda x, _: grey(x))
    if config.blur:
        images = some(2, config.blur, lambda x, draw: gaussian_blur(x, _sigma(draw, batch)))
    if config.solarize:
        images = some(3, config.solarize, lambda x, _: solarize(x, SOLARIZE_FROM))
    return images


def color_jitter(images: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Changes brightness, contrast and saturation of each image, in this order.

    As torchvision's ColorJitter, which also shuffles the order, by factors uniform in
    [max(0, 1 - s), 1 + s]; see `blended`.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      key: random key.
      strength: s, 0.3 to 0.4 in the DeiT recipes.

    Returns:
      (B, H, W, 3) float32 in [0, 255], not rounded.
    """
    shape = (3, images.shape[0], 1, 1, 1)
    factors = jax.random.uniform(key, shape, minval=max(0.0, 1 - strength), maxval=1 + strength)
    return blended(images, *factors)


def jitter(images: jax.Array, factors: jax.Array) -> jax.Array:
    """Changes brightness, contrast, saturation and hue of each image, as torchvision's functions do.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      factors: (4, B), the first three of `blended`; of the hue, which is turned in HSV, 0 leaves it and 1 turns
        it once around.

    Returns:
      (B, H, W, 3) float32 in [0, 255], not rounded.
    """
    *blends, hue = factors[:, :, None, None, None]
    return turned(blended(images, *blends), hue)


def blended(
    images: jax.Array, light: jax.Array, contrast: jax.Array, saturation: jax.Array
) -> jax.Array:
    """Changes brightness, contrast and saturation of each image, in this order, as torchvision's functions do.

    Brightness blends with black, contrast with the image's mean grey, saturation with each pixel's grey;
    values are clipped after each.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      light, contrast, saturation: (B, 1, 1, 1), 1 leaves an image as it is.

    Returns:
      (B, H, W, 3) float32 in [0, 255], not rounded.
    """

    def blend(start, x, factor):
        return jnp.clip(start + factor * (x - start), 0, 255)

    x = blend(0.0, images.astype(jnp.float32), light)
    x = blend(_luma(x).mean((1, 2), keepdims=True), x, contrast)
    return blend(_luma(x), x, saturation)


def turned(images: jax.Array, turn: jax.Array) -> jax.Array:
    """Images (B, H, W, 3) with their hue turned by a share of the circle, (B, 1, 1, 1); value and saturation
    of HSV stay.
    """
    red, green, blue = jnp.split(images, 3, axis=-1)
    value, least = images.max(-1, keepdims=True), images.min(-1, keepdims=True)
    range_ = value - least
    span = jnp.where(range_ > 0, range_, 1.0)
    # Not by what equals `value`: compilers may compute one number twice, with other roundings.
    sixths = jnp.where(
        (red >= green) & (red >= blue),
        (green - blue) / span,
        jnp.where(green >= blue, (blue - red) / span + 2, (red - green) / span + 4),
    )
    # A channel falls from the value by as much as the hue is away from its own.
    away = (jnp.array([5.0, 3.0, 1.0]) + sixths + 6 * turn) % 6
    return value - range_ * jnp.clip(jnp.minimum(away, 4 - away), 0, 1)


def _factors(key: jax.Array, batch: int, strengths: tuple[float, ...]) -> jax.Array:
    """(4, B): uniform within 1 ± the first three strengths, not below 0, and ± the last."""
    *blends, hue = strengths
    low = jnp.array([*(max(0.0, 1 - s) for s in blends), -hue])
    high = jnp.array([*(1 + s for s in blends), hue])
    drawn = jax.random.uniform(key, (batch, 4))
    return (low + (high - low) * drawn).T


def _sigma(key: jax.Array, batch: int) -> jax.Array:
    return jax.random.uniform(key, (batch,), minval=BLUR[0], maxval=BLUR[1])


def _luma(images: jax.Array) -> jax.Array:
    """(B, H, W, 3) -> (B, H, W, 1): what the eye sees as brightness."""
    return jnp.sum(images * jnp.array(GREY, jnp.float32), axis=-1, keepdims=True)


def _rounded(images: jax.Array) -> jax.Array:
    if images.dtype == jnp.uint8:
        return images
    return jnp.floor(images + 0.5).astype(jnp.uint8)
