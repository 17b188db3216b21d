"""Whether an image can be trained on, and what is unusual about it. Stricter than the decoder: a
JPEG whose data is corrupt half-way still decodes, to a picture that is partly grey.
"""

import re

import cv2
import numpy as np
import simplejpeg
from PIL import ExifTags

from vit_jax.data.decoding import decode, images
from vit_jax.data.labels.masks import ClassTable
from vit_jax.data.options import MAX_PIXELS
from vit_jax.data.record import BadImage, Record

_NAMED_AS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WebP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "AVIF": (".avif",),
    "HEIC": (".heic", ".heif"),
}
_WIDE_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
# What libjpeg warns of although no pixel is lost: bytes between segments of the header. Before a
# marker of the data itself (0xd0 to 0xd9) they are what is left of a damaged picture.
_HARMLESS = re.compile(r".*extraneous bytes before marker 0x(?!d\d)..")
_PNG_DEPTH = 24  # where a PNG file says its bits per channel


def encoded(image: bytes | np.ndarray) -> bytes:
    """The bytes of an image file: `image`, or, of pixels (H, W, 3) uint8, a PNG of them."""
    if isinstance(image, bytes):
        return image
    return cv2.imencode(".png", image[..., ::-1])[1].tobytes()


def examine(image: bytes, name: str, max_pixels: int = MAX_PIXELS) -> tuple[np.ndarray, list[str]]:
    """The pixels (H, W, 3) uint8 of an image, and what a user may want to know of how they came
    about: 'CMYK, read as RGB'.

    Raises:
      BadImage: it cannot be trained on, or has more pixels than `max_pixels`.
    """
    pixels = decode.decode(image, name=name, max_pixels=max_pixels)
    kind = images.format_of(image, name)
    remarks = [] if kind == images.NPY else _remarks(image, kind, name)
    if kind == images.JPEG:
        try:
            # An eighth of the size: all of the data is read, little of it becomes pixels.
            simplejpeg.decode_jpeg(image, strict=True, min_height=1, min_width=1)
        except ValueError as error:
            if not _HARMLESS.fullmatch(str(error)):
                raise BadImage(name, str(error)) from None
            remarks.append(str(error))
    return pixels, remarks


def check_label(
    record: Record, classes: int, masks: ClassTable | None, size: tuple[int, int], max_pixels: int
) -> None:
    """Raises `BadImage` if a label of `record` is not one of the `classes`; 0: there are no labels. Where labels are
    `masks`, if that of an image of a height and a width has another, or says what the table does not list.
    """
    if masks is not None:
        name = record.name
        orientation = decode.orientation(record.image, name=name, channels=3, max_pixels=max_pixels)
        masks.decode(
            record.label, name=name, size=size, orientation=orientation, max_pixels=max_pixels
        )
        return
    if not classes:
        return
    for label in record.label if isinstance(record.label, tuple) else (record.label,):
        if label is None or not 0 <= label < classes:
            raise BadImage(record.name, f"its label {label} is none of {classes} classes")


def _remarks(image: bytes, kind: str, name: str) -> list[str]:
    try:
        with images.open_with_pillow(image, kind) as opened:  # the header alone is read
            remarks = []
            file_name = name.rsplit(", ", 1)[-1].lower()
            suffixes = _NAMED_AS.get(kind, ())
            ending = "." + file_name.rpartition(".")[2]
            if any(ending in known for known in _NAMED_AS.values()) and ending not in suffixes:
                remarks.append(f"named {ending}, but it is {kind}")
            if opened.mode in ("CMYK", "YCCK"):
                remarks.append("CMYK, read as RGB")
            if opened.mode in ("1", "L", "LA"):
                remarks.append("grey, read as RGB")
            png_16 = opened.format == "PNG" and image[_PNG_DEPTH] == 16
            if opened.mode in _WIDE_MODES or png_16:
                remarks.append("16 bits, read as 8")
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                remarks.append("transparent, which is dropped")
            if getattr(opened, "is_animated", False):
                remarks.append(f"{opened.n_frames} frames, the first is taken")
            if opened.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
                remarks.append("rotated as its EXIF data says")
            return remarks
    except Exception as error:  # noqa: BLE001  OpenCV has read it; Pillow may raise anything
        return [f"not read by Pillow: {error}"]
