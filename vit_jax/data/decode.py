"""From an encoded image to the pixels that the model sees, on the host. Devices do the rest,
in `augmentation/`.

Where the install could compile it, `native/` cuts plain JPEG files and resizes pixels. OpenCV and
Pillow decode whatever else there is, and everything without it; `resize.py` then gives the same
crops, from images that were decoded whole.
"""

import glob
import io
import os
from collections.abc import Callable, Sequence

import cv2
import numpy as np
from PIL import ExifTags, Image, ImageOps

from vit_jax.data import crops, resize, samples, tiff
from vit_jax.data.crops import Part
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage

_INTERFACE = 2  # as in native/module.c

try:
    from vit_jax.data import _native

    if getattr(_native, "INTERFACE", 1) != _INTERFACE:
        raise ImportError("it was compiled from another version of the code")
except ImportError as error:  # no C compiler at install, or another version of Python
    _native, _why_not_native = None, str(error)
else:
    _why_not_native = ""

__all__ = ["BadImage", "decode", "eval_crop", "is_native", "train_crop"]

# Whole batches run in parallel; threads inside an image would only get in their way.
cv2.setNumThreads(1)
# What cannot be read is reported as `BadImage`.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_PNG = b"\x89PNG"
_PNG_DEPTH, _PNG_COLORS = 24, 25  # where a file says its bits per channel and its kind of colours
_GREY_AND_ALPHA = 4

# What Pillow's readers raise.
_PILLOW_ERRORS = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


def is_native() -> bool:
    """Whether the compiled decoder can be used."""
    return _native is not None


def why_not_native() -> str:
    """Why it cannot."""
    built = glob.glob(os.path.join(os.path.dirname(__file__), "_native.*"))
    return _why_not_native if built else "it was not built at install"


def decode(image: bytes | np.ndarray, *, name: str, channels: int = 3) -> np.ndarray:
    """The pixels of an encoded image, (H, W, C) uint8, upright; of an animation its first frame.

    With three channels or one it is a picture (JPEG, PNG, WebP, BMP and whatever else OpenCV or
    Pillow read): colours, CMYK, palettes and grey become RGB, or grey; transparency is dropped, as
    in TensorFlow. With other numbers of channels they are those of the file, a PNG (2: grey and
    alpha, 4: RGB and alpha), a TIFF or a `.npy`.

    Numbers of other types become bytes as `samples.to_bytes` says.

    Args:
      image: the file's bytes, or an array (H, W, C) or (H, W).
      name: what to call it in errors.
      channels: C.

    Raises:
      BadImage: it is not an image, or only part of one, or it has other channels or values.
    """
    if isinstance(image, np.ndarray):
        return samples.with_channels(samples.to_bytes(image, name), channels, name)
    if not image:
        raise BadImage(name, "it is empty (0 bytes)")
    if _truncated(image):
        raise BadImage(name, f"its end is missing ({len(image)} bytes are there)")
    if image.startswith(samples.NPY):
        pixels = samples.to_bytes(samples.read_npy(image, name), name)
        return samples.with_channels(pixels, channels, name)
    if image.startswith(tiff.MAGIC):
        directory = tiff.read_directory(image, name)
        if not (directory.is_picture and channels in (1, 3)):
            return _decode_tiff(image, directory, channels, name)
    if channels not in (1, 3):
        return _decode_png(image, channels, name)
    wide = image.startswith(_PNG) and image[_PNG_DEPTH] == 16
    flags = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
    pixels = _decode_with_opencv(image, flags | (cv2.IMREAD_ANYDEPTH if wide else 0), name)
    if pixels is None:
        return _decode_with_pillow(image, channels, name)
    return samples.to_bytes(pixels, name)


def _decode_with_opencv(image: bytes, flags: int, name: str) -> np.ndarray | None:
    try:
        return cv2.imdecode(np.frombuffer(image, np.uint8), flags)
    except cv2.error as error:  # OpenCV refuses more than 2**30 pixels this way
        raise BadImage(name, str(error)) from None


def _decode_tiff(image: bytes, directory: tiff.Directory, channels: int, name: str) -> np.ndarray:
    pixels = samples.to_bytes(tiff.read_samples(image, directory, name), name)
    if channels in (1, 3) and directory.has_alpha:
        pixels = pixels[..., :-1]
    return samples.with_channels(pixels, channels, name)


def _decode_png(image: bytes, channels: int, name: str) -> np.ndarray:
    """The grey or colours of a PNG, with its alpha."""
    if not image.startswith(_PNG):
        raise BadImage(
            name,
            f"config.data.channels is {channels}, and only PNG, TIFF and .npy files have so many",
        )
    pixels = _decode_with_opencv(image, cv2.IMREAD_UNCHANGED, name)
    if pixels is None:
        raise BadImage(name, "its data is damaged")
    pixels = samples.to_bytes(pixels, name)
    if pixels.shape[2] == 4:
        grey = image[_PNG_COLORS] == _GREY_AND_ALPHA
        pixels = pixels[..., [0, 3] if grey else [2, 1, 0, 3]]  # OpenCV's order is BGR
    return samples.with_channels(pixels, channels, name)


def _truncated(image: bytes) -> bool:
    """Whether the end mark is missing: decoders may give half an image, the rest grey, and say
    nothing.
    """
    # JPEG: end of image after the last start of scan; a thumbnail inside has its own.
    if image.startswith(b"\xff\xd8"):
        end = image.rfind(b"\xff\xd9")
        return end < 0 or image.find(b"\xff\xda", end) >= 0
    if image.startswith(_PNG):
        return b"IEND" not in image
    return False


def _decode_with_pillow(image: bytes, channels: int, name: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(image)) as opened:
            upright = ImageOps.exif_transpose(opened)
            # Where there are more than 8 bits, Pillow would clip all values above 255.
            is_wide = upright.mode.startswith(("I", "F"))
            pixels = np.asarray(upright if is_wide else upright.convert("RGB"))
    except Image.UnidentifiedImageError:
        raise BadImage(
            name, f"it is no image in a format known here (first bytes: {image[:8]!r})"
        ) from None
    except _PILLOW_ERRORS as error:
        raise BadImage(name, str(error)) from None
    return samples.with_channels(samples.to_bytes(pixels, name), channels, name)


def train_crop(
    image: bytes | np.ndarray,
    config_data: Data,
    draws: Sequence[float],
    *,
    name: str,
    out: np.ndarray | None = None,
) -> np.ndarray:
    """A random part of an image, `crops.shape(config_data)` uint8. `config_data.train_crop` says how
    it is chosen, see `crops.train_part`; 'pad' then puts a border of `pad` zeros around it and cuts
    a part of the same size out.

    Args:
      image: as for `decode`.
      config_data: the section `config.data`.
      draws: `crops.DRAWS` numbers, random in [0, 1), which decide.
      name: what to call the image in errors.
      out: where to put the result, if it has a place already.

    Raises:
      BadImage: see `decode`.
    """
    out = np.empty(crops.shape(config_data), np.uint8) if out is None else out
    _cut(image, name, lambda h, w: crops.train_part(h, w, config_data, draws), config_data, out)
    if config_data.train_crop == "pad":
        pad = config_data.pad
        padded = np.pad(out, ((pad, pad), (pad, pad), (0, 0)))
        top, left = (int(draw * (2 * pad + 1)) for draw in draws[:2])
        out[:] = padded[top : top + out.shape[0], left : left + out.shape[1]]
    return out


def eval_crop(
    image: bytes | np.ndarray, config_data: Data, *, name: str, out: np.ndarray | None = None
) -> np.ndarray:
    """The part of an image that is evaluated, `crops.shape(config_data)` uint8.
    `config_data.eval_crop` says how it is chosen, see `crops.eval_part`.

    Arguments and errors are those of `train_crop`.
    """
    out = np.empty(crops.shape(config_data), np.uint8) if out is None else out
    _cut(image, name, lambda h, w: crops.eval_part(h, w, config_data), config_data, out)
    return out


def _cut(
    image: bytes | np.ndarray,
    name: str,
    part_of: Callable[[int, int], Part],
    config_data: Data,
    out: np.ndarray,
) -> None:
    """Puts the part that `part_of` chooses for a height and a width into `out` (H, W, C)."""
    interpolation = config_data.interpolation
    spare, cubic = resize.SPARE[interpolation], interpolation == "bicubic"
    if _native and isinstance(image, bytes):
        size = _native.plain_jpeg_size(image)
        if size and not _truncated(image):
            box, inside = part_of(*size)
            if _native.cut_jpeg(image, box, inside, spare, cubic, out):
                return
    pixels = decode(image, name=name, channels=out.shape[2])
    part = part_of(*pixels.shape[:2])
    if _native and _native.cut_pixels(np.ascontiguousarray(pixels), *part, cubic, out):
        return
    scale = resize.jpeg_scale(part, *out.shape[:2], interpolation)
    if _native is None and scale < resize.BLOCK:
        sampling = _plain_jpeg_sampling(image)
        if sampling:
            halved = sampling == [(2, 2), (1, 1), (1, 1)]
            pixels, part = resize.shrink_blocks(
                pixels, part, *out.shape[:2], scale, chroma_halved=halved
            )
    resize.cut_pixels(pixels, part, out, interpolation)


def _plain_jpeg_sampling(image: bytes | np.ndarray) -> list[tuple[int, int]]:
    """The sampling factors of each component of a JPEG file of the kind that `native/` decodes, see
    `native/header.c`; of others, and of pixels, [].
    """
    if not isinstance(image, bytes) or not image.startswith(b"\xff\xd8"):
        return []
    try:
        with Image.open(io.BytesIO(image)) as opened:  # reads the header
            about, mode, layers = opened.info, opened.mode, opened.layer
            turned = opened.getexif().get(ExifTags.Base.Orientation, 1) != 1
    except _PILLOW_ERRORS:
        return []
    as_usual = "jfif" in about or about.get("adobe_transform", 1) == 1
    if mode not in ("L", "RGB") or turned or "progressive" in about or not as_usual:
        return []
    return [(across, down) for _, across, down, _ in layers]
