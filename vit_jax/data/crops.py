"""Which part of an image is cut out: the geometry of crops, for training and evaluation.

Cutting it out of a file is the work of `decode.py`.
"""

import math
from collections.abc import Sequence

from vit_jax.base.errors import ConfigError

_TRIES = 10
DRAWS = 4 * _TRIES  # random numbers that a training crop may need

# (top, left, bottom, right) of a part of an image in pixels, and whether the pixels around it do
# not count (cut, then resize) or do (resize, then cut).
Part = tuple[tuple[float, float, float, float], bool]


def train_part(height: int, width: int, config_data, draws: Sequence[float]) -> Part:
    """What `train_crop` cuts out of an image of this size."""
    match config_data.train_crop:
        case "inception":
            return _inception_box(height, width, config_data, draws), True
        case "random":
            return _square(height, width, config_data.resize, config_data.image_size, draws), False
        case "pad" | "resize":
            return (0, 0, height, width), True
    raise ConfigError(f"config.data.train_crop = {config_data.train_crop!r} is unknown")


def eval_part(height: int, width: int, config_data) -> Part:
    """What `eval_crop` cuts out of an image of this size."""
    match config_data.eval_crop:
        case "central":
            return _square(height, width, config_data.eval_resize, config_data.image_size), False
        case "resize":
            return (0, 0, height, width), False
    raise ConfigError(f"config.data.eval_crop = {config_data.eval_crop!r} is unknown")


def check(config_data) -> None:
    """Raises `ConfigError` if no crop can be cut with these sizes."""
    for crop, needs, field in (
        ("train_crop", "random", "resize"),
        ("eval_crop", "central", "eval_resize"),
    ):
        side = getattr(config_data, field)
        if getattr(config_data, crop) == needs and side < config_data.image_size:
            raise ConfigError(
                f"config.data.{field} = {side} is smaller than config.data.image_size = "
                f"{config_data.image_size}: no square can be cut. Raise it, or set config.data.{crop}='resize'"
            )
    low, high = config_data.crop_area
    if not 0 < low <= high <= 1:
        raise ConfigError(
            f"config.data.crop_area = {tuple(config_data.crop_area)} must rise, within (0, 1]"
        )
    low, high = config_data.crop_aspect
    if not 0 < low <= high:
        raise ConfigError(
            f"config.data.crop_aspect = {tuple(config_data.crop_aspect)} must rise, above 0"
        )


def _inception_box(
    height: int, width: int, config_data, draws: Sequence[float]
) -> tuple[int, int, int, int]:
    """A random part of random area and aspect."""
    area, aspect = config_data.crop_area, config_data.crop_aspect
    low, high = math.log(aspect[0]), math.log(aspect[1])
    for i in range(0, 4 * _TRIES, 4):
        target = (area[0] + (area[1] - area[0]) * draws[i]) * height * width
        ratio = math.exp(low + (high - low) * draws[i + 1])
        wide, tall = round(math.sqrt(target * ratio)), round(math.sqrt(target / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(draws[i + 2] * (height - tall + 1))
            left = int(draws[i + 3] * (width - wide + 1))
            return top, left, top + tall, left + wide
    ratio = min(max(width / height, aspect[0]), aspect[1])
    wide = min(width, max(1, round(height * ratio)))
    tall = min(height, max(1, round(width / ratio)))
    top, left = (height - tall) // 2, (width - wide) // 2
    return top, left, top + tall, left + wide


def _square(
    height: int, width: int, side: int, size: int, draws: Sequence[float] | None = None
) -> tuple[float, float, float, float]:
    """The central or a random square of `size` pixels, as if the smaller side were resized to
    `side`.
    """
    scale = side / min(height, width)
    tall, wide = round(height * scale), round(width * scale)
    if draws is None:
        top, left = (tall - size) // 2, (wide - size) // 2
    else:
        top, left = int(draws[0] * (tall - size + 1)), int(draws[1] * (wide - size + 1))
    down, across = height / tall, width / wide
    bottom, right = min((top + size) * down, height), min((left + size) * across, width)
    return top * down, left * across, bottom, right
