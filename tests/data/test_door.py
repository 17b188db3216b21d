"""The one door of images: which formats enter, and what is refused before a library sees it."""

import io
import os
import pickle
import struct
import subprocess
import sys

import numpy as np
import pytest
from PIL import Image

from tests.data.damage import whole_files
from vit_jax.data.decoding import decode, images
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, TooLarge
from vit_jax.data.sources.folder import ImageFiles

FILES = whole_files()
HDR = b"#?RADIANCE\nFORMAT=32-bit_rle_rgbe\n\n-Y 4900 +X 30000\n" + bytes(1000)


@pytest.mark.parametrize(
    "file, format_",
    [
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "EPS"),
        (b"\xc5\xd0\xd3\xc6" + bytes(40), "EPS"),
        (HDR, "Radiance HDR"),
        (b"P7\nWIDTH 9\nHEIGHT 9\nDEPTH 3\nMAXVAL 255\nENDHDR\n" + bytes(243), "PAM"),
        (b"PF\n9 9\n-1.0\n" + bytes(972), "PFM"),
        (b"P6 9 9 255\n" + bytes(243), "PNM"),
        (b"\x76\x2f\x31\x01" + bytes(40), "OpenEXR"),
        (b"8BPS\0\1" + bytes(40), "Photoshop"),
        (b"\0\0\0\x0cjP  \r\n\x87\n" + bytes(40), "JPEG 2000"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "SVG"),
    ],
)
def test_other_formats_are_refused_by_name(file, format_, monkeypatch):
    monkeypatch.setattr(Image, "open", lambda *_, **__: pytest.fail("Pillow was asked"))
    monkeypatch.setattr(decode.cv2, "imdecode", lambda *_: pytest.fail("OpenCV was asked"))
    with pytest.raises(BadImage, match=f"it is .*{format_}.* which is not read"):
        decode.eval_crop(file, Data(), name="x.jpg")


def test_the_first_bytes_say_the_format_and_the_name_does_not(tmp_path):
    kinds = {name: images.format_of(file, name) for name, file in FILES.items()}
    assert set(kinds.values()) == set(images.FORMATS) - {images.HEIC}
    assert images.format_of(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "x") == images.HEIC
    (tmp_path / "photo.gif").write_bytes(FILES["AVIF"])
    content = images.read_file(str(tmp_path / "photo.gif"))
    assert decode.decode(content, name="photo.gif").shape == (48, 64, 3)


@pytest.mark.parametrize("kind", FILES)
def test_the_size_is_that_of_the_header_and_limits_apply_to_every_format(kind):
    head = images.check_image(FILES[kind], "x", 64 * 48)
    assert (head.height, head.width) == (48, 64)
    with pytest.raises(TooLarge, match=r"64 x 48 pixels, more than config.data.max_pixels = 3,071"):
        images.check_image(FILES[kind], "x", 64 * 48 - 1)
    channels = 5 if "5" in kind or kind == "npy" else 3
    data = Data(image_size=8, eval_crop="resize", channels=channels, max_pixels=100)
    with pytest.raises(TooLarge):
        decode.eval_crop(FILES[kind], data, name="x")


def test_a_small_file_that_says_it_is_huge_takes_no_memory():
    """In a process of its own: a PNG of 30,000 x 30,000 black pixels has 100 kB."""
    code = """
import resource, struct, zlib
from vit_jax.data.decoding import decode
head = struct.pack(">IIBBBBB", 30_000, 30_000, 1, 0, 0, 0, 0)
chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(bytes(3751 * 30_000))), (b"IEND", b"")]
png = b"\\x89PNG\\r\\n\\x1a\\n" + b"".join(
    struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks
)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    decode.decode(png, name="x")
except decode.BadImage as error:
    print(error)
assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**15, "32 MB"
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "30000 x 30000 pixels" in done.stdout, done.stderr


def test_a_tiff_whose_samples_would_take_too_much_is_refused():
    entries = [(256, 4, 1, 1000), (257, 4, 1, 1000), (258, 3, 1, 64), (277, 3, 1, 4000)]
    packed = b"".join(struct.pack("<HHII", *entry) for entry in entries)
    file = b"II*\0" + struct.pack("<IH", 8, len(entries)) + packed + bytes(4)
    with pytest.raises(TooLarge, match="its samples take 32,000,000,000 bytes"):
        decode.decode(file, name="x", channels=16)


def test_a_jpeg_of_thousands_of_scans_is_refused():
    progressive = FILES["progressive"]
    scan = progressive.rindex(b"\xff\xda")
    many = progressive[:scan] + progressive[scan:-2] * 1000 + b"\xff\xd9"
    with pytest.raises(BadImage, match="more than 500 scans"):
        decode.decode(many, name="x")


def test_a_large_jpeg_may_have_fewer_scans():
    file = io.BytesIO()
    Image.new("L", (8000, 8000)).save(file, "JPEG", progressive=True)
    progressive = file.getvalue()
    first = progressive.index(b"\xff\xda", progressive.index(b"\xff\xda") + 2)  # of a few bytes
    second = progressive.index(b"\xff\xda", first + 2)
    many = progressive[:first] + progressive[first:second] * 480 + progressive[first:]
    with pytest.raises(BadImage, match="more than 33 scans of 8000 x 8000 pixels"):
        images.check_image(many, "x", 2**26)
    assert images.check_image(progressive, "x", 2**26).height == 8000


@pytest.mark.parametrize(
    "error", [RuntimeError, NotImplementedError, MemoryError, ZeroDivisionError]
)
def test_whatever_a_decoder_raises_is_a_bad_image(monkeypatch, error):
    def fails(*_, **__):
        raise error("inside")

    monkeypatch.setattr(Image.Image, "load", fails)
    monkeypatch.setattr(Image, "open", fails)
    with pytest.raises(BadImage, match="image x cannot be read: inside"):
        decode.eval_crop(FILES["GIF"], Data(), name="x")


def test_only_regular_files_of_bounded_size_are_read(tmp_path, monkeypatch):
    zero, pipe, large = tmp_path / "a.jpg", tmp_path / "b.jpg", tmp_path / "c.jpg"
    zero.symlink_to("/dev/zero")
    os.mkfifo(pipe)
    with open(large, "wb") as file:
        file.truncate(2**40)
    source = ImageFiles(str(tmp_path), (), False, ("a.jpg", "b.jpg", "c.jpg", "d.jpg"), None)
    for index, why in enumerate(["no regular file"] * 2 + ["more than 1,073", "no such file"]):
        monkeypatch.setattr(images, "MOST_BYTES", 2**30)
        with pytest.raises(BadImage, match=f"{'abcd'[index]}.jpg cannot be read: .*{why}"):
            source[index]


def test_too_large_survives_the_way_from_a_worker_process():
    error = pickle.loads(pickle.dumps(TooLarge("file.jpg", "it is large")))
    assert isinstance(error, TooLarge) and error.args == ("file.jpg", "it is large")


def test_heic_is_read_with_its_extra():
    import io

    import pillow_heif

    file = io.BytesIO()
    pixels = np.full((48, 64, 3), (200, 30, 90), np.uint8)
    pillow_heif.from_pillow(Image.fromarray(pixels)).save(file)
    found = decode.decode(file.getvalue(), name="x")
    assert found.shape == (48, 64, 3) and np.abs(found.astype(int) - pixels).max() < 12


def test_without_the_extra_heic_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pillow_heif", None)
    with pytest.raises(BadImage, match=r"pip install .*\[heic\]"):
        decode.decode(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99), name="x")
