"""From an encoded image to the pixels that the model sees, on the host. Devices do the rest,
in `augmentation/`.

Files enter by `images.check_image`. Libraries of kept wheels decode: libjpeg-turbo JPEG, OpenCV and Pillow
the rest; Pillow resizes everything.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import cv2
import numpy as np
from PIL import Image, ImageOps

from vit_jax.data import crops
from vit_jax.data.crops import Part
from vit_jax.data.decoding import images, jpeg, resize, samples
from vit_jax.data.labels.masks import IGNORED, LabelMap
from vit_jax.data.options import MAX_PIXELS, Data
from vit_jax.data.record import BadImage, decoding

if TYPE_CHECKING:
    from vit_jax.data.decoding.tiff import Directory

__all__ = ["PIXELS", "BadImage", "decode", "eval_crop", "pillow_pixels", "train_crop"]

# Another number wherever the same file gives other pixels; kept in the description of checkpoints.
PIXELS = 3

Place = tuple[Part, tuple[int, int]]  # a part, and the rows and columns that it fills of its target

# Whole batches run in parallel; threads inside an image would only get in their way.
cv2.setNumThreads(1)
# What cannot be read is reported as `BadImage`.
cv2.utils.logging.setLogLevel(cv2.utils.logging.LOG_LEVEL_SILENT)

_PNG_DEPTH = 24  # the byte of a file that says its bits per channel
_PNG_COLORS = 25  # the byte of a file that says its kind of colours
_GREY_AND_ALPHA = 4
_BY_OPENCV = (images.JPEG, images.PNG, images.WEBP, images.BMP, images.TIFF)


def decode(
    image: bytes | np.ndarray,
    *,
    name: str,
    channels: int = 3,
    max_pixels: int = MAX_PIXELS,
    max_value: int = 0,
) -> np.ndarray:
    """The pixels of an encoded image, (H, W, C) uint8, upright; of an animation its first frame.

    With three channels or one it is a picture in one of `images.FORMATS`: colours, CMYK, palettes and
    grey become RGB, or grey; transparency is dropped, as in TensorFlow. With other numbers of
    channels they are those of the file, a PNG (2: grey and alpha, 4: RGB and alpha), a TIFF or a
    `.npy`.

    Numbers of other types become bytes as `samples.to_bytes` says.

    Args:
      image: the file's bytes, or an array (H, W, C) or (H, W).
      name: what to call it in errors.
      channels: C.
      max_pixels: a file of more is refused before it is decoded.
      max_value: of samples of 16 bits, see `samples.to_bytes`.

    Raises:
      BadImage: it is not an image, or only part of one, or it has other channels or values.
    """
    if isinstance(image, np.ndarray):
        pixels = samples.to_bytes(image, name, max_value)
        return samples.with_channels(pixels, channels, name)
    head = images.check_image(image, name, max_pixels)
    with decoding(name):
        return _decode(image, head, channels, name, max_value)


def _decode(
    image: bytes, head: images.Head, channels: int, name: str, max_value: int
) -> np.ndarray:
    if head.kind == images.NPY:
        pixels = samples.to_bytes(samples.read_npy(image, name), name, max_value)
        return samples.with_channels(pixels, channels, name)
    if head.kind == images.TIFF and not (head.details.is_picture and channels in (1, 3)):
        return _decode_tiff(image, head.details, channels, name, max_value)
    if channels not in (1, 3):
        return _decode_png(image, head.kind, channels, name, max_value)
    if head.kind == images.JPEG:
        pixels = jpeg.decode(image, head.details, 1, channels)
        if pixels is not None:
            return pixels
    if head.kind in _BY_OPENCV:
        flags = cv2.IMREAD_GRAYSCALE if channels == 1 else cv2.IMREAD_COLOR_RGB
        if head.kind == images.PNG and image[_PNG_DEPTH] == 16:
            flags |= cv2.IMREAD_ANYDEPTH
        pixels = cv2.imdecode(np.frombuffer(image, np.uint8), flags)
        if pixels is not None:
            return samples.to_bytes(pixels, name, max_value)
    return _decode_with_pillow(image, head.kind, channels, name, max_value)


def _decode_tiff(
    image: bytes, directory: "Directory", channels: int, name: str, max_value: int
) -> np.ndarray:
    from vit_jax.data.decoding import tiff

    pixels = samples.to_bytes(tiff.read_samples(image, directory, name), name, max_value)
    if channels in (1, 3) and directory.has_alpha:
        pixels = pixels[..., :-1]
    return samples.with_channels(pixels, channels, name)


def _decode_png(image: bytes, kind: str, channels: int, name: str, max_value: int) -> np.ndarray:
    """The grey or colours of a PNG, with its alpha."""
    if kind != images.PNG:
        raise BadImage(
            name,
            f"config.data.channels is {channels}, and only PNG, TIFF and .npy files have that many",
        )
    pixels = cv2.imdecode(np.frombuffer(image, np.uint8), cv2.IMREAD_UNCHANGED)
    if pixels is None:
        raise BadImage(name, "its data is damaged")
    pixels = samples.to_bytes(pixels, name, max_value)
    if pixels.shape[2] == 4:
        grey = image[_PNG_COLORS] == _GREY_AND_ALPHA
        pixels = pixels[..., [0, 3] if grey else [2, 1, 0, 3]]  # OpenCV's order is BGR
    return samples.with_channels(pixels, channels, name)


def _decode_with_pillow(
    image: bytes, kind: str, channels: int, name: str, max_value: int
) -> np.ndarray:
    with images.open_with_pillow(image, kind) as opened:
        pixels = pillow_pixels(opened)
    return samples.with_channels(samples.to_bytes(pixels, name, max_value), channels, name)


def pillow_pixels(image: Image.Image) -> np.ndarray:
    """The pixels of an image of Pillow, upright: (H, W, 3) uint8, or (H, W) of wider types."""
    upright = ImageOps.exif_transpose(image)
    # Where there are more than 8 bits, Pillow would clip all values above 255.
    is_wide = upright.mode.startswith(("I", "F"))
    return np.asarray(upright if is_wide else upright.convert("RGB"))


def orientation(image: bytes | np.ndarray, *, name: str, channels: int, max_pixels: int) -> int:
    """How `decode` turns an image upright: 2 to 8 as EXIF numbers orientations; 0 or 1: not at all.

    Arguments and errors are those of `decode`.
    """
    if isinstance(image, np.ndarray):
        return 0
    head = images.check_image(image, name, max_pixels)
    with decoding(name):
        return _orientation(image, head, channels)


def _orientation(image: bytes, head: images.Head, channels: int) -> int:
    # A PNG of other channels is decoded as it is stored.
    if channels not in (1, 3) and head.kind != images.TIFF:
        return 0
    return images.orientation_of(image, head)


def train_crop(
    image: bytes | np.ndarray,
    config_data: Data,
    draws: Sequence[float],
    *,
    name: str,
    out: np.ndarray | None = None,
    label_map: LabelMap | None = None,
) -> np.ndarray:
    """A random part of an image, `crops.shape(config_data)` uint8. `config_data.train_crop` says how
    it is chosen, see `crops.train_part`; 'pad' then puts a border of `pad` zeros around it and cuts
    a part of the same size out; what 'jitter' does not fill is zero.

    Args:
      image: as for `decode`.
      config_data: the section `config.data`.
      draws: `crops.DRAWS` numbers, random in [0, 1), which decide.
      name: what to call the image in errors.
      out: where to put the result, if it has a place already.
      label_map: of the image, of which the same part is cut.

    Raises:
      BadImage: see `decode`; or the label map does not fit the image.
    """
    out = np.empty(crops.shape(config_data), np.uint8) if out is None else out

    def place_of(height: int, width: int) -> Place:
        part = crops.train_part(height, width, config_data, draws)
        return part, crops.filled(height, width, config_data, draws)

    cut(image, name, place_of, config_data, out, label_map)
    if config_data.train_crop == "pad":
        _move(out, config_data.pad, draws, 0)
        if label_map is not None:
            _move(label_map.out, config_data.pad, draws, IGNORED)
    return out


def _move(pixels: np.ndarray, pad: int, draws: Sequence[float], border: int) -> None:
    """Cuts a part of the same size out of `pixels` (H, W, …) with a border around it, in place."""
    edges = [(pad, pad), (pad, pad)] + [(0, 0)] * (pixels.ndim - 2)
    padded = np.pad(pixels, edges, constant_values=border)
    top, left = (int(draw * (2 * pad + 1)) for draw in draws[:2])
    height, width = pixels.shape[:2]
    pixels[:] = padded[top : top + height, left : left + width]


def eval_crop(
    image: bytes | np.ndarray,
    config_data: Data,
    *,
    name: str,
    out: np.ndarray | None = None,
    label_map: LabelMap | None = None,
) -> np.ndarray:
    """The part of an image that is evaluated, `crops.shape(config_data)` uint8.
    `config_data.eval_crop` says how it is chosen, see `crops.eval_part`.

    Arguments and errors are those of `train_crop`.
    """
    out = np.empty(crops.shape(config_data), np.uint8) if out is None else out
    whole = out.shape[:2]
    place_of = lambda h, w: (crops.eval_part(h, w, config_data), whole)  # noqa: E731
    return cut(image, name, place_of, config_data, out, label_map)


def cut(
    image: bytes | np.ndarray,
    name: str,
    place_of: Callable[[int, int], Place],
    config_data: Data,
    out: np.ndarray | None = None,
    label_map: LabelMap | None = None,
) -> np.ndarray:
    """Puts the part that `place_of` chooses for a height and a width into `out` (H, W, C), by default an array of the
    size that it chooses, and of a label map into its own place. Returns what it filled; `BadImage` as of `decode`.
    """

    def part_of(height: int, width: int) -> Part:
        nonlocal out
        part, (rows, columns) = place_of(height, width)
        if label_map is not None:
            size = (height, width)
            most = config_data.max_pixels
            label_map.cut(part, (rows, columns), size, turned, name=name, max_pixels=most)
        if out is None:
            out = np.empty((rows, columns, channels), np.uint8)
        if (rows, columns) != out.shape[:2]:
            out[:] = 0
            out = out[:rows, :columns]
        return part

    channels = config_data.channels
    interpolation = config_data.interpolation
    max_value = config_data.max_value
    turned = 0
    if isinstance(image, np.ndarray):
        pixels = decode(image, name=name, channels=channels, max_value=max_value)
        part = part_of(*pixels.shape[:2])
        resize.cut_pixels(pixels, part, out, interpolation)
        return out
    head = images.check_image(image, name, config_data.max_pixels)
    with decoding(name):
        if label_map is not None:
            turned = _orientation(image, head, channels)
        if head.kind == images.JPEG and channels in (1, 3):
            part = part_of(*head.details.upright)
            scale = resize.jpeg_scale(part, *out.shape[:2], interpolation)
            scale = jpeg.scale_of(image, head.details, scale) if scale > 1 else 1
            if scale > 1:
                pixels = jpeg.decode(image, head.details, scale, channels)
                if pixels is not None:
                    resize.cut_pixels(pixels, resize.scaled(part, scale), out, interpolation)
                    return out
            pixels = _decode(image, head, channels, name, max_value)
        else:
            pixels = _decode(image, head, channels, name, max_value)
            part = part_of(*pixels.shape[:2])
        resize.cut_pixels(pixels, part, out, interpolation)
    return out
