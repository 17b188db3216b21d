"""Damaged image files, for the tests of what reads them."""

import io
from collections.abc import Iterator

import cv2
import numpy as np
from PIL import Image

from tests.data.tiff_files import tiff


def whole_files() -> dict[str, bytes]:
    """A small file of each kind that is read."""
    random = np.random.default_rng(0)
    noise = random.integers(0, 256, (6, 8, 16), np.uint8)
    pixels = cv2.resize(noise, (64, 48), interpolation=cv2.INTER_CUBIC)
    picture, wide = Image.fromarray(pixels[..., :3]), pixels.astype(np.uint16) * 257
    exif = Image.Exif()
    exif[0x0112] = 6
    npy = io.BytesIO()
    np.save(npy, pixels[..., :5])
    return {
        "4:4:4": _saved(picture, "JPEG", subsampling="4:4:4"),
        "4:2:0, marks": _saved(picture, "JPEG", subsampling="4:2:0", restart_marker_blocks=2),
        "progressive": _saved(picture, "JPEG", progressive=True),
        "turned": _saved(picture, "JPEG", exif=exif),
        "grey": _saved(picture.convert("L"), "JPEG"),
        "CMYK": _saved(picture.convert("CMYK"), "JPEG"),
        "PNG": _saved(picture, "PNG"),
        "PNG of 16 bits": cv2.imencode(".png", wide[..., :4])[1].tobytes(),
        "PNG of 1 bit": _saved(picture.convert("1"), "PNG"),
        "GIF": _saved(picture, "GIF", save_all=True, append_images=[picture.rotate(90)]),
        "WebP": _saved(picture, "WEBP"),
        "WebP, lossless": _saved(picture, "WEBP", lossless=True),
        "WebP, animated": _saved(
            picture, "WEBP", save_all=True, append_images=[picture.rotate(90)]
        ),
        "AVIF": _saved(picture, "AVIF"),
        "AVIF, animated": _saved(
            picture, "AVIF", save_all=True, append_images=[picture.rotate(90)]
        ),
        "BMP": _saved(picture, "BMP"),
        "TIFF, LZW": _saved(picture, "TIFF", compression="tiff_lzw"),
        "TIFF, 5 of 16 bits": tiff(wide[..., :5], deflate=True, differences=True),
        "TIFF, 3 of floats": tiff((pixels[..., :3] / 255).astype(np.float32), separate=True),
        "npy": npy.getvalue(),
    }  # fmt: skip


def damaged(file: bytes, count: int, random: np.random.Generator) -> Iterator[bytes]:
    """`count` files with bytes changed, taken out or repeated, or cut short; half of them near the
    beginning, where the header is.
    """
    for _ in range(count):
        changed = bytearray(file)
        reach = len(file) if random.random() < 0.5 else min(300, len(file))
        for place in random.integers(reach, size=random.integers(1, 4)).tolist():
            place = min(place, len(changed) - 1)
            match random.integers(4):
                case 0 | 1:
                    changed[place] = random.integers(256)
                case 2:
                    changed[place : place + 2] = b"\xff\xff"[: random.integers(3)]
                case 3:
                    changed[place:place] = changed[place : place + random.integers(1, 9)]
        yield bytes(changed[: random.integers(len(changed))] if random.random() < 0.2 else changed)


def _saved(picture: Image.Image, kind: str, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()
