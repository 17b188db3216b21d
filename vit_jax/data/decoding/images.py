"""The door through which every image enters: which formats are read, and what an image may take.

The format is recognised by a file's first bytes, never by its name, and its size is read from its
header before any library is asked to decode it. Decoders are called by `decode.py` and `tiff.py`
alone, inside `decoding`: whatever they raise is a `BadImage`.
"""

import dataclasses
import io
import os
import stat
import struct
from typing import TYPE_CHECKING

from PIL import ExifTags, Image, UnidentifiedImageError

from vit_jax.base import limits, places
from vit_jax.data.decoding import jpeg, samples
from vit_jax.data.record import BadImage, TooLarge, decoding

if TYPE_CHECKING:
    from vit_jax.data.decoding.tiff import Directory

JPEG, PNG, WEBP, GIF, BMP, TIFF, NPY, AVIF, HEIC = FORMATS = (
    "JPEG", "PNG", "WebP", "GIF", "BMP", "TIFF", ".npy", "AVIF", "HEIC",
)  # fmt: skip
MOST_BYTES = 2**30  # of a file
_MOST_BYTES_PER_PIXEL = 16  # of the samples of a file, on average, once they are decompressed

_BEGINNINGS = {
    JPEG: (b"\xff\xd8\xff",),
    PNG: (b"\x89PNG\r\n\x1a\n",),
    GIF: (b"GIF87a", b"GIF89a"),
    BMP: (b"BM",),
    TIFF: (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"),  # the last two: BigTIFF
    NPY: (samples.NPY,),
}
# The brands of files in boxes (ISO 14496-12), of which one is the kind of image.
_BRANDS = {
    AVIF: {b"avif", b"avis"},
    HEIC: {b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"},
}
_MOST_BRANDS = 128  # bytes of a file in which its brands are looked for
# Formats that are not read, so that a message can name them.
_OTHERS = {
    "EPS or PostScript": (b"%!PS", b"\xc5\xd0\xd3\xc6"),
    "PDF": (b"%PDF",),
    "Radiance HDR": (b"#?RADIANCE", b"#?RGBE"),
    "PNM, PAM or PFM": tuple(b"P%c" % kind for kind in b"1234567Ff"),
    "JPEG 2000": (b"\0\0\0\x0cjP  ", b"\xff\x4f\xff\x51"),
    "JPEG XL": (b"\0\0\0\x0cJXL ", b"\xff\x0a"),
    "OpenEXR": (b"\x76\x2f\x31\x01",),
    "Photoshop": (b"8BPS",),
    "icon": (b"\0\0\1\0", b"\0\0\2\0"),
    "SVG or other XML": (b"<svg", b"<?xml"),
    "FITS": (b"SIMPLE",),
    "DirectDraw Surface": (b"DDS ",),
    "Sun raster": (b"\x59\xa6\x6a\x95",),
}
# A PNG has EXIF data in the chunk eXIf, or in a text as older programs write it.
_PNG_EXIF = (b"eXIf", b"Raw profile type exif")
_OLD_BMP = 12  # bytes of the header whose sides have 16 bits


@dataclasses.dataclass(frozen=True)
class Head:
    """What the beginning of a file says.

    Attributes:
      kind: its format, one of `FORMATS`.
      height, width: as stored, before it is turned upright.
      details: of a JPEG and a TIFF, more than that.
      sample_bytes: of all samples, where a pixel may have many.
    """

    kind: str
    height: int
    width: int
    details: "jpeg.Header | Directory | None" = None
    sample_bytes: int = 0


def check_image(image: bytes, name: str, max_pixels: int) -> Head:
    """What a file is, if it may be decoded.

    Args:
      image: the file's bytes.
      name: what to call it in errors.
      max_pixels: how many an image may have, by its header.

    Raises:
      TooLarge: it has more bytes or pixels.
      BadImage: it has another format, no header that tells its size, or no end.
    """
    check_bytes(len(image), name)
    kind = format_of(image, name)
    if kind == PNG and b"IEND" not in image:  # decoders give the part that is there
        raise BadImage(name, f"its end is missing ({len(image)} bytes are there)")
    with decoding(name):
        head = _read_head(image, kind, name)
    if head.height < 1 or head.width < 1:
        raise BadImage(name, f"its header says {head.width} x {head.height} pixels")
    check_pixels(head.height, head.width, name, max_pixels)
    if head.sample_bytes > _MOST_BYTES_PER_PIXEL * max_pixels:
        raise TooLarge(
            name,
            f"its samples take {head.sample_bytes:,} bytes, more than {_MOST_BYTES_PER_PIXEL} for each of "
            f"config.data.max_pixels = {max_pixels:,}",
        )
    return head


def check_bytes(size: int, name: str) -> None:
    """Raises `BadImage` for a file of `size` bytes that is empty or too large."""
    if not size:
        raise BadImage(name, "it is empty (0 bytes)")
    if size > MOST_BYTES:
        raise TooLarge(name, f"it has {size:,} bytes, more than {MOST_BYTES:,}")


def check_pixels(height: int, width: int, name: str, max_pixels: int) -> None:
    """Raises `TooLarge` for an image of more pixels than `max_pixels`."""
    if height * width > max_pixels:
        raise TooLarge(
            name,
            f"it has {width} x {height} pixels, more than config.data.max_pixels = {max_pixels:,}",
        )


def format_of(image: bytes, name: str) -> str:
    """The format that the first bytes of a file are of, one of `FORMATS`.

    Raises:
      BadImage: they are of none of these; the message names the format where it is a known one.
    """
    for kind, beginnings in _BEGINNINGS.items():
        if image.startswith(beginnings):
            return kind
    if image.startswith(b"RIFF") and image[8:12] == b"WEBP":
        return WEBP
    if image[4:8] == b"ftyp":
        stop = min(len(image), int.from_bytes(image[:4], "big"), _MOST_BRANDS)
        brands = {image[at : at + 4] for at in range(8, stop, 4)}
        for kind, known in _BRANDS.items():
            if brands & known:
                return kind
    for other, beginnings in _OTHERS.items():
        if image.lstrip().startswith(beginnings):
            raise BadImage(name, f"it is {other}, which is not read; {_listed()} are")
    raise BadImage(
        name,
        f"it is no image in a format known here (first bytes: {image[:8]!r}); {_listed()} are read",
    )


def orientation_of(image: bytes, head: Head) -> int:
    """How a file asks to be turned, 1 to 8 as EXIF numbers orientations; 0 if it does not say.

    Args:
      head: of the file.
    """
    if head.kind in (JPEG, TIFF):
        return head.details.orientation
    if head.kind == NPY or (head.kind == PNG and not any(mark in image for mark in _PNG_EXIF)):
        return 0
    with open_with_pillow(image, head.kind) as opened:
        orientation = opened.getexif().get(ExifTags.Base.Orientation, 0)
    return orientation if orientation in range(1, 9) else 0


def read_file(path: str, name: str | None = None) -> bytes:
    """The bytes of an image's file.

    Args:
      path: of the file, local or in a bucket.
      name: what to call it in errors; the path if it is not given.

    Raises:
      BadImage: it cannot be read, is no regular file (a device, a pipe), or is too large.
    """
    name = name or path
    try:
        if not places.in_bucket(path):
            # Before it is opened: a pipe that nobody writes to would never open.
            about = os.stat(path)
            if not stat.S_ISREG(about.st_mode):
                raise BadImage(name, "it is no regular file")
            check_bytes(about.st_size, name)
            with places.open_bytes(path) as file:
                content = file.read(MOST_BYTES + 1)
        else:
            content = places.read_bytes(path)
    except FileNotFoundError:
        raise BadImage(name, "there is no such file") from None
    except OSError as error:
        if limits.is_shortage(error):
            raise
        raise BadImage(name, error.strerror or str(error)) from None
    check_bytes(len(content), name)
    return content


def open_with_pillow(image: bytes, kind: str) -> Image.Image:
    """An image of the format `kind` and of no other, its header read and nothing else."""
    if kind == HEIC:
        _register_heic()
    try:
        return Image.open(io.BytesIO(image), formats=["HEIF" if kind == HEIC else kind.upper()])
    except UnidentifiedImageError:  # whose text has an address, another one each time
        raise ValueError(f"it begins like {kind}, and is none that can be read") from None


def _read_head(image: bytes, kind: str, name: str) -> Head:
    match kind:
        case "JPEG":
            header = jpeg.read_header(image, name)
            return Head(kind, header.height, header.width, header)
        case "TIFF":
            from vit_jax.data.decoding import tiff

            directory = tiff.read_directory(image, name)
            return Head(kind, *directory.size, directory, directory.sample_bytes)
        case ".npy":
            shape, *_ = samples.npy_header(image, name)
            return Head(kind, *(max(side, 1) for side in (*shape, 1, 1)[:2]))
        case "PNG":
            width, height = struct.unpack_from(">II", image, 16)
        case "GIF":
            width, height = struct.unpack_from("<HH", image, 6)
        case "BMP":
            (size,) = struct.unpack_from("<I", image, 14)
            sides = "<HH" if size == _OLD_BMP else "<ii"
            width, height = map(abs, struct.unpack_from(sides, image, 18))
        case "WebP":
            width, height = _webp_size(image)
        case _:
            with open_with_pillow(image, kind) as opened:
                width, height = opened.size
    return Head(kind, height, width)


def _webp_size(image: bytes) -> tuple[int, int]:
    """(width, height) of a WebP file (RFC 9649, §2.5 to §2.7)."""
    match image[12:16]:
        case b"VP8X":
            return tuple(1 + int.from_bytes(image[at : at + 3], "little") for at in (24, 27))
        case b"VP8L":
            (bits,) = struct.unpack_from("<I", image, 21)
            return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
        case b"VP8 ":
            return tuple(side & 0x3FFF for side in struct.unpack_from("<HH", image, 26))
    raise ValueError(f"it is a WebP of an unknown kind, {image[12:16]!r}")


def _register_heic() -> None:
    try:
        import pillow_heif
    except ImportError:
        from vit_jax.base.install import pip_install

        raise ValueError(f"HEIC needs pillow-heif: {pip_install('heic')}") from None
    pillow_heif.register_heif_opener()


def _listed() -> str:
    return f"{', '.join(FORMATS[:-1])} and {FORMATS[-1]}"
