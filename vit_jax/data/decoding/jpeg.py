"""JPEG files, decoded by libjpeg-turbo (simplejpeg): whole, or at a half, a quarter or an eighth of
their size, upright.
"""

import dataclasses
import re
import struct
from collections.abc import Iterator

import numpy as np
import simplejpeg
from PIL import ExifTags, Image

from vit_jax.data.decoding import samples
from vit_jax.data.record import BadImage

# Frames, the markers after which the size stands; not those of tables in between (T.81, table B.1).
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_ALONE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers without a length
_PROGRESSIVE = frozenset((0xC2, 0xC6, 0xCA, 0xCE))
_START = 0xD8
_END = 0xD9
_SCAN = 0xDA
_EXIF = 0xE1
_END_OF_IMAGE = b"\xff\xd9"
_START_OF_IMAGE = 0xD8FF  # its two bytes as a number, the lower byte first
# Segments with a length that may follow a scan: tables, a number of lines, another scan, comments.
_AFTER_SCANS = frozenset((0xC4, 0xCC, _SCAN, 0xDB, 0xDC, 0xDD, *range(0xE0, 0xF0), 0xFE))
# Within a scan a byte 0xFF is followed by 0, is a restart or fills up; else it begins a marker.
_MARKER = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")
# Each scan of a progressive file touches all of its coefficients: thousands of empty ones would
# take minutes. Encoders write about ten. The pixels of all scans take seconds: 32 scans of 64 megapixels do.
_MOST_SCANS = 500
_MOST_SCANNED = 2**31
_LESS = {"444": 1, "420": 1, "Gray": 1, "422": 2, "440": 2}  # see `scale_of`


@dataclasses.dataclass(frozen=True)
class Header:
    """What a file says before its data.

    Attributes:
      height, width: as stored, before `orientation` is applied.
      orientation: of EXIF, 1 to 8.
    """

    height: int
    width: int
    orientation: int

    @property
    def upright(self) -> tuple[int, int]:
        """(height, width) once it is turned."""
        return (self.width, self.height) if self.orientation > 4 else (self.height, self.width)


def read_header(image: bytes, name: str) -> Header:
    """Reads the segments before the first scan, and finds the end of the image.

    Raises:
      BadImage: it is damaged, or its end is missing.
    """
    orientation = 1
    size = None
    is_progressive = False
    end = None
    for marker, start, stop in _segments(image):
        if marker == _SCAN:
            end = _find_end(image, start - 4)
        elif marker in _FRAMES:
            _, height, width = struct.unpack_from(">BHH", image, start)
            size = size or (height, width)
            is_progressive |= marker in _PROGRESSIVE
        elif marker == _EXIF and image[start : start + 6] == b"Exif\0\0":
            orientation = _orientation(image[start:stop])
    if end is None:
        # Decoders would give the part that is there, the rest grey, and say nothing.
        raise BadImage(name, f"its end is missing ({len(image)} bytes are there)")
    if size is None:
        raise BadImage(name, "its header is damaged: it has no frame")
    most = min(_MOST_SCANS, _MOST_SCANNED // max(size[0] * size[1], 1))
    if is_progressive and image.count(b"\xff\xda", 0, end) > most:
        raise BadImage(name, f"it has more than {most} scans of {size[1]} x {size[0]} pixels")
    return Header(*size, orientation)


def decode(image: bytes, header: Header, scale: int, channels: int) -> np.ndarray | None:
    """The pixels of a file, (H, W, C) uint8, upright; `None` for one that libjpeg-turbo does not
    decode to RGB or grey: CMYK, or unusual subsampling.

    Args:
      scale: by what each side is divided, rounded up: 1, 2, 4 or 8.
      channels: 3 for RGB, 1 for grey.
    """
    height, width = (-(-side // scale) for side in (header.height, header.width))
    smaller = {"min_height": height, "min_width": width} if scale > 1 else {}
    try:
        pixels = simplejpeg.decode_jpeg(
            image, "RGB" if channels == 3 else "GRAY", strict=False, **smaller
        )
    except ValueError:
        return None
    if pixels.shape[:2] != (height, width):  # of a few pixels, several fractions have the same size
        return None
    return samples.upright(pixels, header.orientation)


def scale_of(image: bytes, header: Header, scale: int) -> int:
    """By what a file's sides may be divided, at most by `scale`, for the same picture: by
    1. one, where it is turned and its sides are no multiples of `scale`: the pixels that are
       rounded up would come first;
    2. half of `scale`, where chroma is halved along one side alone (4:2:2, 4:4:0): it is averaged
       along the other as luma is, and again along that one;
    3. one, where it has a sample of chroma for four pixels of a row (4:1:1).
    """
    if header.orientation != 1 and (header.height % scale or header.width % scale):
        return 1
    try:
        sampling = simplejpeg.decode_jpeg_header(image, strict=False)[3]
    except ValueError:
        return 1
    return max(1, scale // _LESS.get(sampling, scale))


def _segments(image: bytes) -> Iterator[tuple[int, int, int]]:
    """(marker, start, stop) of the content of each segment to the header of the first scan."""
    at = 2
    while at + 4 <= len(image):
        if image[at] != 0xFF:  # what libjpeg skips, too
            at = image.find(b"\xff", at)
            if at < 0:
                return
            continue
        marker = image[at + 1]
        if marker == _END:
            return
        if marker in (0x00, 0xFF, _START) or marker in _ALONE:
            at += 1 if marker == 0xFF else 2
            continue
        (length,) = struct.unpack_from(">H", image, at + 2)
        yield marker, at + 4, at + 2 + length
        if marker == _SCAN:
            return
        at += 2 + max(length, 2)


def _find_end(image: bytes, first_scan: int) -> int | None:
    """Where the end mark of the image itself stands; `None` if its data has none.

    Anything may follow that mark: phones append films, archives and more images, whose bytes look
    like marks too. So the marks of the image are walked from its first scan on.

    Args:
      image: the file's bytes.
      first_scan: where the marker of the first scan begins.
    """
    # Nearly all files end here. The walk takes 2 to 3% of the time of decoding, this look 0.2%.
    if image.endswith(_END_OF_IMAGE) and not _has_start(image, first_scan):
        return len(image) - 2
    at = first_scan
    while image[at : at + 1] == b"\xff" and at + 4 <= len(image):
        marker = image[at + 1]
        if marker == 0xFF:
            at += 1
            continue
        if marker not in _AFTER_SCANS:
            return at if marker == _END else None
        (length,) = struct.unpack_from(">H", image, at + 2)
        at += 2 + max(length, 2)
        if marker == _SCAN:
            following = _MARKER.search(image, at)
            if following is None:
                return None
            at = following.start()
    return at if image[at : at + 2] == _END_OF_IMAGE else None


def _has_start(image: bytes, first_scan: int) -> bool:
    """Whether another image begins behind the first scan: the last end mark may be that one's."""
    for start in (first_scan, first_scan + 1):
        pairs = np.frombuffer(image, "<u2", count=(len(image) - start) // 2, offset=start)
        if (pairs == _START_OF_IMAGE).any():
            return True
    return False


def _orientation(exif: bytes) -> int:
    """The orientation that EXIF data says; 1, upright, where it is damaged."""
    try:
        tags = Image.Exif()
        tags.load(exif)
        orientation = tags.get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001  Pillow's reader raises several; a picture is more than its tags
        return 1
    return orientation if orientation in range(1, 9) else 1
