"""From an encoded image to the square of pixels the model sees, on the host. Devices do the rest,
in `augment.py`.
"""

import io

import cv2
import numpy as np
from PIL import Image, ImageOps

from vit_jax.data.record import BadImage
from vit_jax.schema import ConfigError

__all__ = ["BadImage", "check_crops", "decode", "eval_crop", "resize", "train_crop"]

cv2.setNumThreads(
    1
)  # whole batches run in parallel; threads inside an image would only get in their way
cv2.utils.logging.setLogLevel(
    cv2.utils.logging.LOG_LEVEL_SILENT
)  # what cannot be read is said by BadImage

_TRIES = 10


def decode(image: bytes | np.ndarray, *, name: str) -> np.ndarray:
    """RGB pixels, (H, W, 3) uint8, of an encoded image (JPEG, PNG, WebP, BMP and whatever else
    OpenCV or Pillow read).

    EXIF orientation is applied; grey, CMYK, palettes and 16 bits become RGB of 8; transparency is
    dropped as in TensorFlow, and the first frame of an animation is taken. Pixels already decoded
    are given back as they are.

    Args:
      image: the file's bytes, or (H, W, 3) uint8.
      name: what to call it in errors.

    Raises:
      BadImage: it is not an image, or only part of one.
    """
    if isinstance(image, np.ndarray):
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
            raise BadImage(name, f"(H, W, 3) uint8 is needed, this is {image.shape} {image.dtype}")
        return image
    if not image:
        raise BadImage(name, "it is empty (0 bytes)")
    if _truncated(image):
        raise BadImage(name, f"its end is missing ({len(image)} bytes are there)")
    try:
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_COLOR_RGB)
    except cv2.error as error:  # OpenCV refuses more than 2**30 pixels this way
        raise BadImage(name, str(error)) from None
    return _decode_with_pillow(image, name) if pixels is None else pixels


def _truncated(image: bytes) -> bool:
    """Whether the end mark is missing: decoders may give half an image, the rest grey, and say
    nothing.
    """
    if image.startswith(
        b"\xff\xd8"
    ):  # JPEG: end of image after the last start of scan; a thumbnail inside has its own
        return image.rfind(b"\xff\xd9") <= image.rfind(b"\xff\xda")
    if image.startswith(b"\x89PNG"):
        return b"IEND" not in image
    return False


def _decode_with_pillow(image: bytes, name: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            return np.asarray(ImageOps.exif_transpose(opened).convert("RGB"))
    except Image.UnidentifiedImageError:
        raise BadImage(
            name, f"it is no image in a format known here (first bytes: {image[:8]!r})"
        ) from None
    except (
        OSError,
        SyntaxError,
        ValueError,
        Image.DecompressionBombError,
    ) as error:  # what Pillow's readers raise
        raise BadImage(name, str(error)) from None


def train_crop(image: np.ndarray, config_data, rng: np.random.Generator) -> np.ndarray:
    """A random part of `image` (H, W, 3) as a square of `config_data.image_size`, (S, S, 3) uint8.

    `config_data.train_crop` says how:
      inception: share of the area uniform in `crop_area`, aspect ratio log-uniform in
        `crop_aspect`, resized to the square (Szegedy et al. 2014, arXiv 1409.4842, §6); after ten
        that do not fit, the largest central part of a valid aspect ratio.
      random: the smaller side is resized to `resize`, then a square is cut (AlexNet, §4.1).
      pad: a border of `pad` zeros, then a square is cut (He et al. 2015, arXiv 1512.03385, §4.2).
      resize: the whole image, nothing random.
    """
    size = config_data.image_size
    match config_data.train_crop:
        case "inception":
            area, aspect = config_data.crop_area, config_data.crop_aspect
            top, left, height, width = _inception_box(*image.shape[:2], area, aspect, rng)
            return resize(image[top : top + height, left : left + width], size, size)
        case "random":
            return _random_square(resize(image, *_scaled(image, config_data.resize)), size, rng)
        case "pad":
            border = ((config_data.pad,) * 2, (config_data.pad,) * 2, (0, 0))
            return _random_square(np.pad(resize(image, size, size), border), size, rng)
        case "resize":
            return resize(image, size, size)
    raise ConfigError(f"config.data.train_crop = {config_data.train_crop!r} is unknown")


def eval_crop(image: np.ndarray, config_data) -> np.ndarray:
    """The part of `image` (H, W, 3) that is evaluated, (S, S, 3) uint8, with an antialiased
    bilinear filter.

    `config_data.eval_crop` says how:
      central: as if the smaller side were resized to `eval_resize` and the central square cut out
      (AlexNet, §4.1).
      resize: the whole image.
    """
    # Pillow rather than OpenCV: slower, but OpenCV's area average comes only within 44 dB of the
    # antialiased filter.
    size = config_data.image_size
    match config_data.eval_crop:
        case "central":
            height, width = _scaled(image, config_data.eval_resize)
            down, across = image.shape[0] / height, image.shape[1] / width
            top, left = (height - size) // 2, (width - size) // 2
            right, bottom = (
                min((left + size) * across, image.shape[1]),
                min((top + size) * down, image.shape[0]),
            )
            box = (left * across, top * down, right, bottom)
        case "resize":
            box = (0, 0, image.shape[1], image.shape[0])
        case other:
            raise ConfigError(f"config.data.eval_crop = {other!r} is unknown")
    return np.asarray(
        Image.fromarray(image).resize((size, size), Image.Resampling.BILINEAR, box=box)
    )


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """`image` (H, W, 3) uint8 at another size: area average where it shrinks by more than 1.4, else
    bilinear.
    """
    if max(image.shape[0] / height, image.shape[1] / width) > 1.4:
        # OpenCV averages areas only if neither side grows; a side that does is left to the second
        # step.
        smaller = (min(width, image.shape[1]), min(height, image.shape[0]))
        image = cv2.resize(image, smaller, interpolation=cv2.INTER_AREA)
    if image.shape[:2] != (height, width):
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_LINEAR)
    return image


def check_crops(config_data) -> None:
    """Raises `ConfigError` if no crop can be cut with these sizes."""
    for crop, needs, field in (
        ("train_crop", "random", "resize"),
        ("eval_crop", "central", "eval_resize"),
    ):
        if config_data[crop] == needs and config_data[field] < config_data.image_size:
            raise ConfigError(
                f"config.data.{field} = {config_data[field]} is smaller than config.data.image_size = "
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
    height: int, width: int, area: tuple, aspect: tuple, rng: np.random.Generator
) -> tuple[int, ...]:
    """(top, left, height, width) of a random part."""
    for _ in range(_TRIES):
        target = rng.uniform(*area) * height * width
        ratio = np.exp(rng.uniform(*np.log(aspect)))
        crop_width, crop_height = round(np.sqrt(target * ratio)), round(np.sqrt(target / ratio))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            top, left = rng.integers(height - crop_height + 1), rng.integers(width - crop_width + 1)
            return top, left, crop_height, crop_width
    ratio = np.clip(width / height, *aspect)
    crop_width, crop_height = (
        min(width, max(1, round(height * ratio))),
        min(height, max(1, round(width / ratio))),
    )
    return (height - crop_height) // 2, (width - crop_width) // 2, crop_height, crop_width


def _random_square(image: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    top, left = rng.integers(image.shape[0] - size + 1), rng.integers(image.shape[1] - size + 1)
    return image[top : top + size, left : left + size]


def _scaled(image: np.ndarray, side: int) -> tuple[int, int]:
    """The height and width at which the smaller side is `side`."""
    height, width = image.shape[:2]
    scale = side / min(height, width)
    return round(height * scale), round(width * scale)
