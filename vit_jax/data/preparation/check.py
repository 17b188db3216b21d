"""Whether an image can be trained on, and what is unusual about it. Stricter than the decoder: a
JPEG whose data is corrupt half-way still decodes, to a picture that is partly grey.
"""

import io
import re

import cv2
import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from vit_jax.data import decode
from vit_jax.data.record import BadImage, Record

_NAMED_AS = {
    "JPEG": (".jpg", ".jpeg"),
    "MPO": (".jpg", ".jpeg"),  # JPEG with further pictures after the first, from some cameras
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
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


def examine(image: bytes, name: str) -> tuple[np.ndarray, list[str]]:
    """The pixels (H, W, 3) uint8 of an image, and what a user may want to know of how they came
    about: 'CMYK, read as RGB'.

    Raises:
      BadImage: it cannot be trained on.
    """
    pixels, remarks = decode.decode(image, name=name), _remarks(image, name)
    if image.startswith(b"\xff\xd8"):
        try:
            # An eighth of the size: all of the data is read, little of it becomes pixels.
            simplejpeg.decode_jpeg(image, strict=True, min_height=1, min_width=1)
        except ValueError as error:
            if not _HARMLESS.fullmatch(str(error)):
                raise BadImage(name, str(error)) from None
            remarks.append(str(error))
    return pixels, remarks


def check_label(record: Record, classes: int) -> None:
    """Raises `BadImage` if a label of `record` is not one of the `classes`; 0: there are no labels."""
    if not classes:
        return
    for label in record.label if isinstance(record.label, tuple) else (record.label,):
        if label is None or not 0 <= label < classes:
            raise BadImage(record.name, f"its label {label} is none of {classes} classes")


def _remarks(image: bytes, name: str) -> list[str]:
    try:
        with Image.open(io.BytesIO(image)) as opened:  # the header alone is read
            remarks = []
            file_name = name.rsplit(", ", 1)[-1].lower()
            suffixes = _NAMED_AS.get(opened.format, ())
            ending = "." + file_name.rpartition(".")[2]
            if any(ending in known for known in _NAMED_AS.values()) and ending not in suffixes:
                remarks.append(f"named {ending}, but it is {opened.format}")
            if opened.mode in ("CMYK", "YCCK"):
                remarks.append("CMYK, read as RGB")
            if opened.mode in ("1", "L", "LA"):
                remarks.append("grey, read as RGB")
            png_16 = opened.format == "PNG" and image[_PNG_DEPTH] == 16
            if opened.mode in _WIDE_MODES or png_16:
                remarks.append("16 bits, read as 8")
            if opened.mode in ("RGBA", "LA", "PA") or "transparency" in opened.info:
                remarks.append("transparent, which is dropped")
            if getattr(opened, "is_animated", False) and opened.format != "MPO":
                remarks.append(f"{opened.n_frames} frames, the first is taken")
            if opened.getexif().get(ExifTags.Base.Orientation, 1) not in (0, 1):
                remarks.append("rotated as its EXIF data says")
            return remarks
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        return [f"not read by Pillow: {error}"]  # the decoder has read it, by OpenCV
