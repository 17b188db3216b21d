"""Random changes to a batch of training images, made on the devices inside the compiled step.

Lives here: the order of augmentation, flip, colour jitter, normalisation, random erasing, mixup and
cutmix. RandAugment is in `randaugment.py`; cutting images out of files is the host's work, in
`decode.py`. Everything is a pure function of its arguments, works on the whole batch, and gives the
same result however the batch is sharded.
"""

import math

import jax
import jax.numpy as jnp

from vit_jax.data.randaugment import GREY, randaugment

ERASED_AREA = (0.02, 1 / 3)
ERASED_ASPECT = (0.3, 1 / 0.3)
ERASING_ATTEMPTS = 10


def augment(
    images: jax.Array, labels: jax.Array, key: jax.Array, config, *, mean, std, dtype=jnp.float32
) -> tuple[jax.Array, jax.Array]:
    """Augments and normalises a batch for training, as `config` says.

    The order is that of the field:
    1. flip, 2. RandAugment, 3. colour jitter: on pixels in [0, 255];
    4. normalisation;
    5. random erasing, whose noise is standard normal and so belongs after normalisation;
    6. mixup or cutmix, which mix finished examples.

    Args:
      images: (B, H, W, 3) uint8.
      labels: (B, K) float32, one-hot or multi-hot.
      key: random key; each operation has a sub-key, so switching one off leaves the draws of the
        others as they are.
      config: the section `config.augment`; its fields are explained in `vit_jax.config.Augment`.
      mean, std: three numbers each, of RGB in [0, 1].
      dtype: of the images returned; all arithmetic is float32.

    Returns:
      images (B, H, W, 3) of `dtype` and labels (B, K) float32.
    """
    if images.dtype != jnp.uint8:
        raise ValueError(
            f"augment takes uint8 images, not {images.dtype}: pass them as the loader yields them"
        )
    flip_key, randaugment_key, jitter_key, erase_key, mix_key = jax.random.split(key, 5)
    if config.flip:
        images = flip(images, flip_key)
    if config.randaugment_layers:
        images = randaugment(
            images, randaugment_key, config.randaugment_layers, config.randaugment_magnitude
        )
    if config.color_jitter:
        images = color_jitter(images, jitter_key, config.color_jitter)
    images = normalize(images, mean, std, jnp.float32)
    if config.erasing:
        images = erase(images, erase_key, config.erasing)
    labels = labels.astype(jnp.float32)
    if config.mixup or config.cutmix:
        own = own_share(mix_key, images.shape[1:3], config.mixup, config.cutmix, config.mix_switch)
        images, labels = mix(images, labels, own)
    return images.astype(dtype), labels


def normalize(images: jax.Array, mean, std, dtype) -> jax.Array:
    """(images / 255 - mean) / std, computed in float32; all that evaluation does.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      mean, std: three numbers each, of RGB in [0, 1].
      dtype: of the result.
    """
    mean, std = jnp.array(mean, jnp.float32), jnp.array(std, jnp.float32)
    return ((images.astype(jnp.float32) / 255 - mean) / std).astype(dtype)


def flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors each image (B, H, W, C) left-right with probability 1/2."""
    chosen = jax.random.bernoulli(key, shape=(images.shape[0], 1, 1, 1))
    return jnp.where(chosen, images[:, :, ::-1], images)


def color_jitter(images: jax.Array, key: jax.Array, strength: float) -> jax.Array:
    """Changes brightness, contrast and saturation of each image, in this order.

    As torchvision's ColorJitter, which also shuffles the order: brightness blends with black,
    contrast with the mean grey of the image, saturation with each pixel's grey, by factors uniform
    in [max(0, 1 - s), 1 + s]; values are clipped after each.

    Args:
      images: (B, H, W, 3) uint8, or float in [0, 255].
      key: random key.
      strength: s, 0.3 to 0.4 in the DeiT recipes.

    Returns:
      (B, H, W, 3) float32 in [0, 255], not rounded.
    """
    shape = (3, images.shape[0], 1, 1, 1)
    light, contrast, saturation = jax.random.uniform(
        key, shape, minval=max(0.0, 1 - strength), maxval=1 + strength
    )

    def blend(start, images, factor):
        return jnp.clip(start + factor * (images - start), 0, 255)

    images = blend(0.0, images.astype(jnp.float32), light)
    images = blend(_grey(images).mean((1, 2), keepdims=True), images, contrast)
    return blend(_grey(images), images, saturation)


def erase(images: jax.Array, key: jax.Array, probability: float) -> jax.Array:
    """Replaces a random box of each image by standard normal noise, each image with the given
    probability.

    Random Erasing (arXiv:1708.04896) as timm's mode 'pixel' does it: the box covers 2 to 33 % of
    the image, its aspect ratio is log-uniform in [0.3, 1/0.3]; sizes are drawn again, up to 10
    times, until the box fits; an image for which none fits stays whole.

    Args:
      images: (B, H, W, C) float, normalised.
      key: random key.
      probability: in [0, 1].
    """
    batch, height, width, _ = images.shape
    chosen_key, area_key, aspect_key, top_key, left_key, noise_key = jax.random.split(key, 6)
    attempts = (batch, ERASING_ATTEMPTS)
    area = (
        height
        * width
        * jax.random.uniform(area_key, attempts, minval=ERASED_AREA[0], maxval=ERASED_AREA[1])
    )
    log_aspect = [math.log(a) for a in ERASED_ASPECT]
    aspect = jnp.exp(
        jax.random.uniform(aspect_key, attempts, minval=log_aspect[0], maxval=log_aspect[1])
    )
    tall = jnp.round(jnp.sqrt(area * aspect)).astype(jnp.int32)
    wide = jnp.round(jnp.sqrt(area / aspect)).astype(jnp.int32)
    fits = (tall < height) & (wide < width)
    first = jnp.argmax(fits, axis=1, keepdims=True)
    tall, wide = (jnp.take_along_axis(size, first, axis=1)[:, 0] for size in (tall, wide))
    top = jax.random.randint(top_key, (batch,), 0, height - tall + 1)
    left = jax.random.randint(left_key, (batch,), 0, width - wide + 1)
    chosen = jax.random.bernoulli(chosen_key, probability, (batch,)) & fits.any(axis=1)
    box = _box(images.shape[1:3], top, top + tall, left, left + wide) & chosen[:, None, None]
    return jnp.where(
        box[..., None], jax.random.normal(noise_key, images.shape, images.dtype), images
    )


def own_share(
    key: jax.Array, size: tuple[int, int], mixup: float, cutmix: float, switch: float
) -> jax.Array:
    """How much of its own value each pixel keeps when the images of a batch are mixed; drawn once
    for the batch.

    mixup (arXiv:1710.09412, as in big_vision): a everywhere, with a ~ Beta(p, p), then the larger
    of a and 1 - a. cutmix (arXiv:1905.04899): 0 in a box, 1 outside. The box has the sides of the
    image times sqrt(1 - a), with a ~ Beta(p, p), and a centre that is uniform over the pixels; it
    is cut off at the border.

    Args:
      key: random key.
      size: (H, W) of the images.
      mixup, cutmix: p, the parameter of the Beta distribution; 0: not this one.
      switch: with both, the probability of cutmix.

    Returns:
      (H, W) float32 in [0, 1].
    """
    switch_key, mixup_key, cutmix_key, *centre_keys = jax.random.split(key, 5)
    if mixup:
        a = jax.random.beta(mixup_key, mixup, mixup)
        mixed = jnp.full(size, jnp.maximum(a, 1 - a))
        if not cutmix:
            return mixed
    reach = jnp.sqrt(1 - jax.random.beta(cutmix_key, cutmix, cutmix))
    bounds = []
    for side, centre_key in zip(size, centre_keys, strict=True):
        centre = jax.random.randint(centre_key, (1,), 0, side)
        half = (reach * side).astype(jnp.int32) // 2
        bounds += [centre - half, centre + half]
    cut = 1 - _box(size, *bounds)[0].astype(jnp.float32)
    return jnp.where(jax.random.bernoulli(switch_key, switch), cut, mixed) if mixup else cut


def mix(images: jax.Array, labels: jax.Array, own: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mixes every example with the one before it (the first with the last), labels by as much as
    pixels.

    Args:
      images: (B, H, W, C) float.
      labels: (B, K) float32.
      own: (H, W) in [0, 1], how much each pixel keeps of its own.
    """

    def blend(values, own):
        return own * values + (1 - own) * jnp.roll(values, 1, axis=0)

    return blend(images, own[..., None]), blend(labels, own.mean())


def _grey(images: jax.Array) -> jax.Array:
    """(B, H, W, 3) -> (B, H, W, 1): what the eye sees as brightness."""
    return jnp.sum(images * jnp.array(GREY, jnp.float32), axis=-1, keepdims=True)


def _box(size: tuple[int, int], top, bottom, left, right) -> jax.Array:
    """(B, H, W) bool: true in the box of each of the B bounds; bounds outside the image are cut
    off.
    """
    y, x = jnp.arange(size[0]), jnp.arange(size[1])
    rows = (y >= top[:, None]) & (y < bottom[:, None])
    columns = (x >= left[:, None]) & (x < right[:, None])
    return rows[:, :, None] & columns[:, None, :]
