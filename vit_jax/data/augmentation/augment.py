"""The operations of `pipeline` on whole images: flip, normalisation, random erasing, mixup and cutmix.

Changes of colours are in `color.py`, RandAugment in `randaugment.py` and `timm_augment.py`, which has AutoAugment too,
3-Augment in `three_augment.py`.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.data.options import Augment, Data

if TYPE_CHECKING:
    from ml_collections import ConfigDict

    from vit_jax.models.preprocessing import Preprocessing

ERASING_ATTEMPTS = 10
# Policies that choose among operations.
POLICIES = LazyTable(
    {
        "randaugment": "vit_jax.data.augmentation.randaugment:randaugment",
        "timm_randaugment": "vit_jax.data.augmentation.timm_augment:timm_randaugment",
        "autoaugment": "vit_jax.data.augmentation.timm_augment:autoaugment",
        "three_augment": "vit_jax.data.augmentation.three_augment:three_augment",
    }
)


def check_strengths(config: Augment) -> None:
    """Raises `ConfigError` for strengths in the section `config.augment` that contradict each other."""
    if config.randaugment_std and config.randaugment_kind == "tensorflow":
        raise ConfigError(
            f"config.augment.randaugment_std = {config.randaugment_std}: the magnitudes of "
            "randaugment_kind='tensorflow' are fixed; set it to 0, or the kind to 'timm' or 'timm-inc1'"
        )
    low, high = config.erasing_area
    if not 0 < low <= high < 1:
        raise ConfigError(
            f"config.augment.erasing_area = {config.erasing_area} must be two rising shares of an "
            "image between 0 and 1, such as (0.02, 0.33)"
        )
    if not 0 < config.erasing_aspect <= 1:
        raise ConfigError(
            f"config.augment.erasing_aspect = {config.erasing_aspect} must be above 0 and at most 1"
        )


def check_normalization(
    config_data: "Data | Preprocessing | ConfigDict", source: epath.PathLike
) -> None:
    """Raises `ConfigError` if the section `config.data` leaves mean or std to `source`, a checkpoint that does not
    say them.
    """
    if not (config_data.mean and config_data.std):
        raise ConfigError(
            f"{source} does not say how images are normalised: set config.data.mean and std, "
            "(0.5, 0.5, 0.5) both for Google's weights, (0.485, 0.456, 0.406) and (0.229, 0.224, 0.225) "
            "for DeiT's; and eval_crop, eval_resize and interpolation, unless images are just resized by a "
            "bilinear filter"
        )


def with_channels(config_data: Data) -> Data:
    """The section `config.data` with a `mean` and a `std` for each channel: one number stands for all channels, and
    so do the defaults.

    Raises:
      ConfigError: there are several, but not one for each channel.
    """
    values, channels = {}, config_data.channels
    for field in dataclasses.fields(config_data):
        if field.name not in ("mean", "std"):
            continue
        numbers = getattr(config_data, field.name)
        if len(numbers) == 1 or (numbers == field.default and channels != len(numbers)):
            numbers = numbers[:1] * channels
        if len(numbers) != channels:
            raise ConfigError(
                f"config.data.{field.name} = {numbers} has {len(numbers)} numbers, and config.data.channels is "
                f"{channels}: give one number for each channel, or one for all"
            )
        values[field.name] = numbers
    return dataclasses.replace(config_data, **values)


def check_pixels(pixels: jax.Array) -> None:
    """Raises `ValueError` unless pixels are uint8."""
    if pixels.dtype != jnp.uint8:
        raise ValueError(
            f"augment takes uint8 images, not {pixels.dtype}: pass them as the loader yields them"
        )


class WholeImages:
    """The layout (B, H, W, C) of images, see `pipeline.PixelLayout`."""

    def check(self, images: jax.Array) -> None:
        check_pixels(images)

    def flip(self, images: jax.Array, key: jax.Array) -> jax.Array:
        return flip(images, key)

    def choose_operations(
        self, images: jax.Array, key: jax.Array, config: Augment, mean: Sequence[float]
    ) -> jax.Array:
        return choose_operations(images, key, config, mean)

    def change_pixels(
        self, images: jax.Array, change: Callable[[jax.Array, None], jax.Array]
    ) -> jax.Array:
        return change(images, None)

    def normalize(
        self, images: jax.Array, mean: Sequence[float], std: Sequence[float]
    ) -> jax.Array:
        return normalize(images, mean, std, jnp.float32)

    def erase(self, images: jax.Array, key: jax.Array, config: Augment) -> jax.Array:
        return erase(
            images,
            key,
            config.erasing,
            mode=config.erasing_mode,
            area=config.erasing_area,
            aspect=config.erasing_aspect,
        )

    def mix(
        self, images: jax.Array, targets: Any, key: jax.Array, config: Augment
    ) -> tuple[jax.Array, Any]:
        size = images.shape[1:3]
        share = own_share(key, size, config.mixup, config.cutmix, config.mix_switch)
        return mix(images, targets, share)

    def cast(self, images: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return images.astype(dtype)


def choose_operations(
    images: jax.Array, key: jax.Array, config: Augment, mean: Sequence[float], **layout: Any
) -> jax.Array:
    """RandAugment and AutoAugment, as `config` says; `layout`: of images that are not whole."""
    fill = tuple(min(255, round(255 * m)) for m in mean)  # as timm; others fill with 128
    if config.randaugment_layers:
        strength = config.randaugment_layers, config.randaugment_magnitude
        if config.randaugment_kind == "tensorflow":
            images = POLICIES["randaugment"](images, key, *strength, **layout)
        else:
            kind = {"std": config.randaugment_std, "fill": fill}
            kind["increasing"] = config.randaugment_kind == "timm-inc1"
            images = POLICIES["timm_randaugment"](images, key, *strength, **kind, **layout)
    if config.autoaugment:
        key = jax.random.fold_in(key, 1)
        images = POLICIES["autoaugment"](images, key, fill=fill, **layout)
    return images


def normalize(
    images: jax.Array, mean: Sequence[float], std: Sequence[float], dtype: jax.typing.DTypeLike
) -> jax.Array:
    """(images / 255 - mean) / std, computed in float32; what evaluation does.

    Args:
      images: (B, H, W, C) uint8, or float in [0, 255].
      mean, std: (C,), of pixels in [0, 1].
      dtype: of the result.
    """
    mean, std = jnp.array(mean, jnp.float32), jnp.array(std, jnp.float32)
    return ((images.astype(jnp.float32) / 255 - mean) / std).astype(dtype)


def prepared(images: jax.Array, config_data: Data, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Images as evaluation gives them to a model: normalised, and permuted if the section `config.data` says so.
    Arguments as for `normalize`.
    """
    images = normalize(images, config_data.mean, config_data.std, dtype)
    return permuted(images, config_data)


def permuted(images: Any, config_data: Data) -> Any:
    """Images permuted as `config.data` says, see `permute`."""
    if config_data.permute == "none":
        return images
    from vit_jax.data.augmentation import permute

    return permute.permuted(images, config_data.permute_patch, config_data.permute)


def flip(images: jax.Array, key: jax.Array) -> jax.Array:
    """Mirrors each image (B, H, W, C) left-right with probability 1/2."""
    chosen = jax.random.bernoulli(key, shape=(images.shape[0], 1, 1, 1))
    return jnp.where(chosen, images[:, :, ::-1], images)


def erase(
    images: jax.Array,
    key: jax.Array,
    probability: float,
    *,
    mode: str = "pixel",
    area: tuple[float, float] = (0.02, 1 / 3),
    aspect: float = 0.3,
) -> jax.Array:
    """Replaces a random box of each image, each image with the given probability.

    Random Erasing (arXiv:1708.04896) as timm does it, with one box: sizes are drawn again, up to 10 times, until the
    box is smaller than the image both ways; an image for which none fits stays whole.

    Args:
      images: (B, H, W, C) float, normalised.
      key: random key.
      probability: in [0, 1].
      mode: what the box is filled with: 'pixel', standard normal noise; 'rand', one standard normal value for each
        channel; 'const', 0, which is the mean colour.
      area: least and largest share of the image that a box covers, uniform between them.
      aspect: height / width of the box is log-uniform between this and its inverse.
    """
    height, width = images.shape[1:3]
    *bounds, noise_key = draw_boxes(key, len(images), height, width, probability, area, aspect)
    box = _box((height, width), *bounds)
    if mode == "const":
        return jnp.where(box[..., None], 0, images)
    shape = images.shape if mode == "pixel" else (len(images), 1, 1, images.shape[-1])
    return jnp.where(box[..., None], jax.random.normal(noise_key, shape, images.dtype), images)


def draw_boxes(
    key: jax.Array,
    batch: int,
    height: int | jax.Array,
    width: int | jax.Array,
    probability: float,
    area: tuple[float, float],
    aspect: float,
) -> tuple[jax.Array, ...]:
    """The boxes of `erase`; height and width of all images, or (B, 1) of each.

    Returns:
      top, bottom, left, right, (B,) each, an empty box where nothing is replaced; and a key for what it is filled with.
    """
    chosen_key, area_key, aspect_key, top_key, left_key, noise_key = jax.random.split(key, 6)
    attempts = (batch, ERASING_ATTEMPTS)
    pixels = height * width * jax.random.uniform(area_key, attempts, minval=area[0], maxval=area[1])
    extreme = -math.log(aspect)
    ratio = jnp.exp(jax.random.uniform(aspect_key, attempts, minval=-extreme, maxval=extreme))
    tall = jnp.round(jnp.sqrt(pixels * ratio)).astype(jnp.int32)
    wide = jnp.round(jnp.sqrt(pixels / ratio)).astype(jnp.int32)
    fits = (tall < height) & (wide < width)
    first = jnp.argmax(fits, axis=1, keepdims=True)
    chosen = jax.random.bernoulli(chosen_key, probability, (batch,)) & fits.any(axis=1)
    tall, wide = (jnp.take_along_axis(size, first, axis=1)[:, 0] for size in (tall, wide))
    top = jax.random.randint(top_key, (batch,), 0, (height - tall[:, None])[:, 0] + 1)
    left = jax.random.randint(left_key, (batch,), 0, (width - wide[:, None])[:, 0] + 1)
    return top, top + chosen * tall, left, left + wide, noise_key


def own_share(
    key: jax.Array, size: tuple[int, int], mixup: float, cutmix: float, switch: float
) -> jax.Array:
    """How much of its own value each pixel keeps when the images of a batch are mixed; drawn once for the batch.

    mixup (arXiv:1710.09412, as in big_vision): a everywhere, with a ~ Beta(p, p), then the larger of a and 1 - a.
    cutmix (arXiv:1905.04899): 0 in a box, 1 outside. The box has the sides of the image times sqrt(1 - a), with a ~
    Beta(p, p), rounded down to even numbers (timm 1.0.31 keeps odd ones), and a centre that is uniform over the
    pixels; it is cut off at the border.

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


def mix(images: jax.Array, targets: Any, own: jax.Array) -> tuple[jax.Array, Any]:
    """Mixes every example with the previous one (the first with the last), targets by as much as pixels.

    Args:
      images: (B, H, W, C) float.
      targets: a tree of float32 (B, …).
      own: (H, W) in [0, 1], how much each pixel keeps of its own.
    """

    def blend(values, own):
        return own * values + (1 - own) * jnp.roll(values, 1, axis=0)

    share = own.mean()
    return blend(images, own[..., None]), jax.tree.map(lambda x: blend(x, share), targets)


def _box(size: tuple[int, int], top, bottom, left, right) -> jax.Array:
    """(B, H, W) bool: true in the box of each of the B bounds; bounds outside the image are cut off."""
    y, x = jnp.arange(size[0]), jnp.arange(size[1])
    rows = (y >= top[:, None]) & (y < bottom[:, None])
    columns = (x >= left[:, None]) & (x < right[:, None])
    return rows[:, :, None] & columns[:, None, :]
