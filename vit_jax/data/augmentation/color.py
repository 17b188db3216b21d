"""Changes of colours, all in one list: DeiT's colour jitter, of all images; and what DINO and its relatives do to
some of them: jitter, grey, blur, solarise (dinov2/data/augmentations.py).

Another change of colours is a function here, a line in `CHANGES`, and its option in `config.augment`. Policies that
choose among operations (3-Augment, AutoAugment, RandAugment) have files of their own.

torchvision draws the order of the jitter's four changes; here it is always brightness, contrast, saturation, hue. Its
blur has nine taps and mirrors the border; this one is a wider Gaussian.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from vit_jax.data.augmentation.randaugment import GREY, solarize
from vit_jax.data.options import Augment

SOLARIZE_FROM = 128
BLUR = (0.1, 2.0)  # standard deviation in pixels
_REACH = 6  # three standard deviations of the widest blur


class Change(NamedTuple):
    """A change of colours that some of the images get.

    Attributes:
      probability: the field of `config.augment` that has the probability of the change.
      apply: from images (B, H, W, 3) uint8, a random key, the section and `jitter`'s `inside` to all images, changed.
      needs_whole_images: whether it depends on neighbouring pixels, and patches are refused.
    """

    probability: str
    apply: Callable[[jax.Array, jax.Array, Augment, jax.Array | None], jax.Array]
    needs_whole_images: bool = False


# By the field that switches them on, in their order. A change's position is part of its random key: a new
# one comes last, or the present recipes draw other numbers.
CHANGES = {
    "jitter": Change(
        "jitter_probability",
        lambda images, key, config, inside: jitter(
            images, _factors(key, len(images), config.jitter), inside
        ),
    ),
    "grey": Change("grey", lambda images, key, config, inside: grey(images)),
    "blur": Change(
        "blur",
        lambda images, key, config, inside: gaussian_blur(images, blur_sigma(key, len(images))),
        needs_whole_images=True,
    ),
    "solarize": Change(
        "solarize", lambda images, key, config, inside: solarize(images, SOLARIZE_FROM)
    ),
}
FIELDS = ("color_jitter", *CHANGES)  # of `config.augment`, which change colours


def change_colors(
    images: jax.Array, key: jax.Array, config: Augment, inside: jax.Array | None = None
) -> jax.Array:
    """Makes the changes of colours that `config` asks for: `color_jitter` of all images, then each of `CHANGES` of as
    many as its probability says.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      key: random key; each change has a sub-key.
      config: the section `config.augment`.
      inside: see `jitter`.

    Returns:
      uint8; or float in [0, 255] and not rounded, where nothing or the first change alone was made of floats.
    """
    if config.color_jitter:
        images = jitter(images, _blend_factors(key, len(images), config.color_jitter), inside)
    key = jax.random.fold_in(key, 1)
    for number, (field, change) in enumerate(CHANGES.items()):
        if not getattr(config, field):
            continue
        images = _rounded(images)
        choose, draw = jax.random.split(jax.random.fold_in(key, number))
        probability = getattr(config, change.probability)
        chosen = jax.random.bernoulli(choose, probability, (len(images), 1, 1, 1))
        images = jnp.where(chosen, _rounded(change.apply(images, draw, config, inside)), images)
    return images


def jitter(images: jax.Array, factors: jax.Array, inside: jax.Array | None = None) -> jax.Array:
    """Changes brightness, contrast, saturation and perhaps hue of each image, in this order, as torchvision's
    functions do.

    Brightness blends with black, contrast with the image's mean grey, saturation with each pixel's grey; values are
    clipped after each.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      factors: (3 or 4, B, 1, 1, 1): of brightness, contrast and saturation, 1 leaves an image as it is; by how much
        of the circle the hue is turned in HSV.
      inside: (B, H, W, 1) bool, the pixels of images that fill but a part of the array, for their mean grey.

    Returns:
      (B, H, W, 3) float32 in [0, 255], not rounded.
    """

    def blend(start, x, factor):
        return jnp.clip(start + factor * (x - start), 0, 255)

    light, contrast, saturation, *hue = factors
    x = blend(0.0, images.astype(jnp.float32), light)
    x = blend(_luma(x).mean((1, 2), keepdims=True, where=inside), x, contrast)
    x = blend(_luma(x), x, saturation)
    return turned(x, *hue) if hue else x


def turned(images: jax.Array, turn: jax.Array) -> jax.Array:
    """Images (B, H, W, 3) with their hue turned by a share of the circle, (B, 1, 1, 1); value and saturation of HSV
    stay.
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


def grey(images: jax.Array) -> jax.Array:
    """(B, H, W, 3) uint8 -> (B, H, W, 1) uint8: luma to the nearest level, as Pillow's mode L, bit by bit."""
    weights = jnp.array((19595, 38470, 7471), jnp.int32)  # BT.601 times 2^16
    luma = jnp.sum(images.astype(jnp.int32) * weights, -1, keepdims=True)
    return ((luma + 2**15) >> 16).astype(jnp.uint8)


def gaussian_blur(images: jax.Array, sigma: jax.Array) -> jax.Array:
    """Blurs each image (B, H, W, C) uint8 with its standard deviation `sigma` (B,), at most 2 pixels; the border
    continues outwards.

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


def blur_sigma(key: jax.Array, batch: int) -> jax.Array:
    """(B,): a standard deviation for each image, uniform in `BLUR`."""
    return jax.random.uniform(key, (batch,), minval=BLUR[0], maxval=BLUR[1])


def _blend_factors(key: jax.Array, batch: int, strength: float) -> jax.Array:
    """(3, B, 1, 1, 1): uniform within 1 ± strength, not below 0. DeiT's recipes have 0.3 to 0.4."""
    shape = (3, batch, 1, 1, 1)
    return jax.random.uniform(key, shape, minval=max(0.0, 1 - strength), maxval=1 + strength)


def _factors(key: jax.Array, batch: int, strengths: tuple[float, ...]) -> jax.Array:
    """(4, B, 1, 1, 1): uniform within 1 ± the first three strengths, not below 0, and ± the last."""
    *blends, hue = strengths
    low = jnp.array([*(max(0.0, 1 - s) for s in blends), -hue])
    high = jnp.array([*(1 + s for s in blends), hue])
    drawn = jax.random.uniform(key, (batch, 4))
    return (low + (high - low) * drawn).T[:, :, None, None, None]


def _luma(images: jax.Array) -> jax.Array:
    """(B, H, W, 3) -> (B, H, W, 1): what the eye sees as brightness."""
    return jnp.sum(images * jnp.array(GREY, jnp.float32), axis=-1, keepdims=True)


def _rounded(images: jax.Array) -> jax.Array:
    if images.dtype == jnp.uint8:
        return images
    return jnp.floor(images + 0.5).astype(jnp.uint8)
