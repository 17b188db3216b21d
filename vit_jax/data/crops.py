"""Which part of an image is cut out: the geometry of crops, for training and evaluation.

Sizes are height × width. Cutting a part out of a file and resizing it is the work of `decode.py`.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vit_jax.base import sizes
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data

if TYPE_CHECKING:
    from vit_jax.models.preprocessing import Preprocessing

_TRIES = 10
_RESIZING = ("central", "torchvision", "transformers", "squash")  # crops that use `eval_resize`
DRAWS = 4 * _TRIES  # random numbers that a training crop may need

# The fields of `Data` that say how a training image is cut.
TRAINING = ("train_crop", "crop_area", "crop_aspect", "crop_scale", "resize", "pad")

# (top, left, bottom, right) of a part of an image in pixels, and whether the pixels around it do
# not count (cut, then resize) or do (resize, then cut).
Part = tuple[tuple[float, float, float, float], bool]


def shape(config_data: Data) -> tuple[int, int, int]:
    """(height, width, channels) of an image as the model gets it."""
    return (*sizes.height_width(config_data.image_size), config_data.channels)


def batch_shape(config_data: Data) -> tuple[int, ...]:
    """(height, width, channels) of an image in a batch; of those at sizes of their own (patches, values of a patch)."""
    if config_data.native_tokens:
        return config_data.native_tokens, config_data.native_patch**2 * config_data.channels
    return shape(config_data)


def train_part(height: int, width: int, config_data: Data, draws: Sequence[float]) -> Part:
    """The part that is cut out of an image of this size for training, and then resized to
    `config_data.image_size`, the target.

    `config_data.train_crop` says how:
      inception: share of the area uniform in `crop_area`, aspect ratio log-uniform in `crop_aspect`
        times that of the target (Szegedy et al. 2014, arXiv 1409.4842, §6); after ten that do not
        fit, the largest central part of a valid aspect ratio.
      random: a random place in the image resized by `resize`, see `_place` (AlexNet, §4.1).
      pad: the whole image, which `decode.train_crop` then moves (He et al. 2015, arXiv 1512.03385,
        §4.2).
      resize: the whole image, nothing random.
      jitter: a random place in the image enlarged by a factor uniform in `crop_scale`; a smaller one
        fills the top left of the target, see `filled` (scale jitter, arXiv 2012.07177 §3).

    Args:
      draws: `DRAWS` numbers, random in [0, 1), which decide.
    """
    match config_data.train_crop:
        case "inception":
            return _inception_box(height, width, config_data, draws), True
        case "random":
            target = sizes.height_width(config_data.image_size)
            return _place((height, width), target, config_data.resize, draws), False
        case "pad" | "resize":
            return (0, 0, height, width), True
        case "jitter":
            return _jittered((height, width), config_data, draws)[0], False
    raise ConfigError(f"config.data.train_crop = {config_data.train_crop!r} is unknown")


def filled(height: int, width: int, config_data: Data, draws: Sequence[float]) -> tuple[int, int]:
    """Rows and columns of the target that `train_part` fills, from its top left: all but of a jitter crop."""
    if config_data.train_crop == "jitter":
        return _jittered((height, width), config_data, draws)[1]
    return sizes.height_width(config_data.image_size)


def eval_part(height: int, width: int, config_data: Data) -> Part:
    """The part that is cut out of an image of this size for evaluation, and then resized to
    `config_data.image_size`, the target.

    `config_data.eval_crop` says how:
      central: the middle of the image resized by `eval_resize`, see `_place` (AlexNet, §4.1).
      torchvision: the same with the rounding of torchvision's Resize and CenterCrop, as timm and
        what is trained with them evaluate; it moves a crop by up to a pixel.
      transformers: the same with the rounding of Hugging Face's image processors.
      squash: the middle of the image squeezed to the target's aspect ratio, its smaller side
        `eval_resize` pixels (timm's crop mode of that name).
      resize: the whole image.
    """
    target = sizes.height_width(config_data.image_size)
    side = config_data.eval_resize
    match config_data.eval_crop:
        case "central":
            return _place((height, width), target, side), False
        case "torchvision" | "transformers":
            resized = _resized_by_torchvision((height, width), target, side)
            half = round if config_data.eval_crop == "torchvision" else math.floor
            return _middle((height, width), resized, target, half), False
        case "squash":
            resized = [math.floor(side * length / min(target)) for length in target]
            return _middle((height, width), resized, target, round), False
        case "resize":
            return (0, 0, height, width), False
    raise ConfigError(f"config.data.eval_crop = {config_data.eval_crop!r} is unknown")


def describe_crop(config_data: "Data | Preprocessing") -> str:
    """How evaluation images are cut, in words: 'torchvision crop of images resized to 248, bicubic'."""
    text = config_data.eval_crop
    if text in _RESIZING:
        text += f" crop of images resized to {config_data.eval_resize}"
    return f"{text}, {config_data.interpolation}"


def check_crops(config_data: Data) -> None:
    """Raises `ConfigError` if no crop can be cut with these sizes."""
    smaller = min(sizes.height_width(config_data.image_size))
    for crop, needing, field in (
        ("train_crop", ("random",), "resize"),
        ("eval_crop", _RESIZING, "eval_resize"),
    ):
        side = getattr(config_data, field)
        if getattr(config_data, crop) in needing and side < smaller:
            raise ConfigError(
                f"config.data.{field} = {side} is smaller than config.data.image_size = "
                f"{sizes.size_text(config_data.image_size)}: nothing of that size can be cut out. Raise it "
                f"to {smaller} or more, or set config.data.{crop}='resize'"
            )
    low, high = config_data.crop_area
    if not 0 < low <= high <= 1:
        raise ConfigError(
            f"config.data.crop_area = {tuple(config_data.crop_area)} must rise, within (0, 1]"
        )
    for field in ("crop_aspect", "crop_scale"):
        low, high = getattr(config_data, field)
        if not 0 < low <= high:
            raise ConfigError(
                f"config.data.{field} = {tuple(getattr(config_data, field))} must rise, above 0"
            )


def _place(
    image: tuple[int, int], target: tuple[int, int], side: int, draws: Sequence[float] | None = None
) -> tuple[float, float, float, float]:
    """The central or a random place of the target's size in a resized image, in pixels of the
    image as it is.

    The image is resized until it just covers a frame that has the target's aspect ratio and whose
    smaller side is `side` pixels. For a square target that is: its smaller side becomes `side`.

    Args:
      image, target: (height, width).
    """
    height, width = image
    tall_frame, wide_frame = (side * (length / min(target)) for length in target)
    scale = max(tall_frame / height, wide_frame / width)
    tall = round(height * scale)
    wide = round(width * scale)
    down_room = tall - target[0]
    across_room = wide - target[1]
    if draws is None:
        top = down_room // 2
        left = across_room // 2
    else:
        top = int(draws[0] * (down_room + 1))
        left = int(draws[1] * (across_room + 1))
    down = height / tall
    across = width / wide
    bottom = min((top + target[0]) * down, height)
    right = min((left + target[1]) * across, width)
    return top * down, left * across, bottom, right


def _jittered(
    image: tuple[int, int], config_data: Data, draws: Sequence[float]
) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """The part of a jitter crop, and the size of what it fills."""
    target = sizes.height_width(config_data.image_size)
    low, high = config_data.crop_scale
    fits = min(size / length for size, length in zip(target, image, strict=True))
    scale = fits * (low + (high - low) * draws[0])
    corners = []
    filled_size = []
    for length, size, draw in zip(image, target, draws[1:3], strict=True):
        new = max(1, round(length * scale))
        shown = min(new, size)
        first = int(draw * (new - shown + 1))
        near = first * length / new
        far = (first + shown) * length / new
        corners.append((near, far))
        filled_size.append(shown)
    (top, bottom), (left, right) = corners
    height, width = image
    bottom = min(bottom, height)
    right = min(right, width)
    return (top, left, bottom, right), tuple(filled_size)


def _resized_by_torchvision(
    image: tuple[int, int], target: tuple[int, int], side: int
) -> list[int]:
    """(height, width) to which torchvision resizes an image for a square target: its smaller side
    becomes `side`, its larger one is rounded down. For other targets timm's ResizeKeepRatio: the
    image covers a frame of the target's aspect ratio, and is rounded to the nearest.
    """
    if target[0] == target[1]:
        return [side * length // min(image) for length in image]
    frame = [math.floor(side * length / min(target)) for length in target]
    ratio = min(length / framed for length, framed in zip(image, frame, strict=True))
    return [round(length / ratio) for length in image]


def _middle(
    image: tuple[int, int],
    resized: Sequence[int],
    target: tuple[int, int],
    rounded: Callable[[float], int],
) -> tuple[float, float, float, float]:
    """The middle of a resized image, in pixels of the image as it is; `rounded` decides where that
    is half a pixel off, torchvision's CenterCrop by `round`.
    """
    corners = []
    for length, new, size in zip(image, resized, target, strict=True):
        begin = rounded((new - size) / 2)
        near = begin * length / new
        far = (begin + size) * length / new
        corners.append((near, far))
    (top, bottom), (left, right) = corners
    return top, left, min(bottom, image[0]), min(right, image[1])


def _inception_box(
    height: int, width: int, config_data: Data, draws: Sequence[float]
) -> tuple[int, int, int, int]:
    """A random part of random area and aspect."""
    tall_target, wide_target = sizes.height_width(config_data.image_size)
    area = config_data.crop_area
    aspect = [ratio * (wide_target / tall_target) for ratio in config_data.crop_aspect]
    low = math.log(aspect[0])
    high = math.log(aspect[1])
    for i in range(0, 4 * _TRIES, 4):
        share = area[0] + (area[1] - area[0]) * draws[i]
        target = share * height * width
        ratio = math.exp(low + (high - low) * draws[i + 1])
        wide = round(math.sqrt(target * ratio))
        tall = round(math.sqrt(target / ratio))
        if 0 < wide <= width and 0 < tall <= height:
            top = int(draws[i + 2] * (height - tall + 1))
            left = int(draws[i + 3] * (width - wide + 1))
            return top, left, top + tall, left + wide
    ratio = min(max(width / height, aspect[0]), aspect[1])
    wide = min(width, max(1, round(height * ratio)))
    tall = min(height, max(1, round(width / ratio)))
    top = (height - tall) // 2
    left = (width - wide) // 2
    return top, left, top + tall, left + wide
