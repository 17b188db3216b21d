"""A folder of class folders with every kind of file that people's folders have."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image


def _save(image: Image.Image, form: str, **options) -> bytes:
    file = io.BytesIO()
    image.save(file, form, **options)
    return file.getvalue()


def _photo(seed: int = 0) -> Image.Image:
    """A smooth picture, so that its JPEG is close to it: (48, 64) with a gradient and a disc."""
    y, x = np.mgrid[:48, :64]
    disc = ((y - 20) ** 2 + (x - 16 - seed) ** 2 < 144) * 90
    return Image.fromarray(np.stack([x * 3, y * 4, disc + 60], -1).astype(np.uint8))


def _middle(image: bytes, other: bytes) -> bytes:
    half = len(image) // 2
    return image[:half] + other + image[half + len(other) :]


def _wide_png(channels: np.ndarray) -> bytes:
    """A PNG of 16 bits per channel, (H, W, 3) uint16."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return (
            struct.pack(">I", len(content))
            + kind
            + content
            + struct.pack(">I", zlib.crc32(kind + content))
        )

    height, width, _ = channels.shape
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in channels)
    header = struct.pack(">IIBBBBB", width, height, 16, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


def _huge_png() -> bytes:
    """A PNG that says it has 100,000 x 100,000 pixels, and has none."""
    png = _save(_photo(), "PNG")
    header = b"IHDR" + struct.pack(">II", 100_000, 100_000) + png[24:29]
    return png[:12] + header + struct.pack(">I", zlib.crc32(header)) + png[33:]


def _turned() -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    return _save(_photo(), "JPEG", exif=exif)


@pytest.fixture(scope="session")
def kinds() -> dict[str, tuple[str, bytes]]:
    """File name → (what the report must say: '' good, 'bad', 'ignored', or words of a remark;
    content).
    """
    photo = _photo()
    jpeg, png = _save(photo, "JPEG", quality=95), _save(photo, "PNG")
    # Noise has enough data for damage in its middle to hit it.
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (64, 64, 3), np.uint8))
    noisy = _save(noise, "JPEG", quality=95)
    progressive = _save(noise, "JPEG", quality=95, progressive=True)
    frames = [_photo(seed) for seed in range(3)]
    wide = np.arange(48 * 64, dtype=np.uint16).reshape(48, 64) * 21
    return {
        "plain.jpg": ("", jpeg),
        "LOUD.JPEG": ("", jpeg),
        "plain.png": ("", png),
        "plain.webp": ("", _save(photo, "WEBP")),
        "plain.bmp": ("", _save(photo, "BMP")),
        "plain.gif": ("", _save(photo, "GIF")),
        "plain.tif": ("", _save(photo, "TIFF")),
        "palette.png": ("", _save(photo.quantize(16), "PNG")),
        "progressive.jpg": ("", progressive),
        "more_after_its_end.jpg": ("", jpeg + b"\0" * 100),
        "tiny.png": ("", _save(photo.resize((1, 1)), "PNG")),
        "loose_header.jpg": ("3 extraneous bytes", jpeg.replace(b"\xff\xc4", b"abc\xff\xc4", 1)),
        "cmyk.jpg": ("CMYK", _save(photo.convert("CMYK"), "JPEG", quality=95)),
        "grey.jpg": ("grey", _save(photo.convert("L"), "JPEG")),
        "black_and_white.png": ("grey", _save(photo.convert("1"), "PNG")),
        "grey16.png": ("16 bits", _save(Image.fromarray(wide), "PNG")),
        "rgb16.png": ("16 bits", _wide_png(np.stack([wide] * 3, -1))),
        "transparent.png": ("transparent", _save(photo.convert("RGBA"), "PNG")),
        "animated.gif": (
            "3 frames",
            _save(frames[0], "GIF", save_all=True, append_images=frames[1:]),
        ),
        "animated.webp": (
            "3 frames",
            _save(frames[0], "WEBP", save_all=True, append_images=frames[1:], lossless=True),
        ),
        "turned.jpg": ("rotated", _turned()),
        "a_png.jpg": ("named .jpg, but it is PNG", png),
        "a_jpeg.png": ("named .png, but it is JPEG", jpeg),
        "empty.jpg": ("bad", b""),
        "half.jpg": ("bad", noisy[: len(noisy) // 2]),
        "half_with_end.jpg": ("bad", noisy[: len(noisy) // 2] + b"\xff\xd9"),
        "half_progressive.jpg": ("bad", progressive[: len(progressive) // 2]),
        "half.png": ("bad", png[: len(png) // 2]),
        "half.webp": ("bad", _save(noise, "WEBP")[:1000]),
        "half.gif": ("bad", _save(noise, "GIF")[:1500]),
        "half.bmp": ("bad", _save(noise, "BMP")[:5000]),
        "half.tif": ("bad", _save(noise, "TIFF")[:5000]),
        "zeros_inside.jpg": ("bad", _middle(noisy, bytes(300))),
        "ends_inside.jpg": ("bad", _middle(noisy, b"\xff\xd9" * 25)),
        "zeros_inside.png": ("bad", _middle(_save(noise, "PNG"), bytes(300))),
        "no_picture.jpg": ("bad", b"\xff\xd8\xff\xd9"),
        "huge.png": ("bad", _huge_png()),
        "page.jpg": ("bad", b"<!DOCTYPE html><html>404 Not Found</html>"),
        "drawing.png": ("bad", b"<svg xmlns='http://www.w3.org/2000/svg'/>"),
        "paper.jpg": ("bad", b"%PDF-1.7\n" + bytes(200)),
        "archive.png": ("bad", b"PK\3\4" + bytes(200)),
        "noise.jpg": ("bad", np.random.default_rng(1).bytes(500)),
        "text.bmp": ("bad", b"no image at all"),
        "notes.txt": ("ignored", b"holidays"),
        "photo": ("ignored", jpeg),
        "photo.heic": ("bad", b"\0\0\0\x18ftypheic" + bytes(100)),
        ".hidden.jpg": ("hidden", b""),
    }


@pytest.fixture
def seeded(tmp_path, kinds):
    """The files of `kinds` and 40 good ones in two class folders; and a link to nothing."""
    root = tmp_path / "images"
    for folder in ("cat", "dog"):
        (root / folder).mkdir(parents=True)
    for i, (name, (_, content)) in enumerate(kinds.items()):
        (root / ("cat", "dog")[i % 2] / name).write_bytes(content)
    for i in range(40):
        (root / ("cat", "dog")[i % 2] / f"good{i}.jpg").write_bytes(_save(_photo(i), "JPEG"))
    (root / "cat" / "link.jpg").symlink_to(root / "nowhere.jpg")
    return root
