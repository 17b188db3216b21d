import io
import pickle
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.data.decoding.decode import BadImage, decode


def smooth_image(height=48, width=64, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)


def encode(image, kind, **options):
    file = io.BytesIO()
    (image if isinstance(image, Image.Image) else Image.fromarray(image)).save(
        file, kind, **options
    )
    return file.getvalue()


def psnr(a, b):
    return 10 * np.log10(255**2 / np.mean((a.astype(np.float64) - b) ** 2))


@pytest.mark.parametrize(
    "kind, options", [("PNG", {}), ("BMP", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_lossless_formats_come_back_bit_for_bit(kind, options):
    image = smooth_image()
    assert np.array_equal(decode(encode(image, kind, **options), name="x"), image)


def test_real_jpegs_decode_as_pillow_decodes_them(shared_data):
    for path in sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:10]:
        expected = np.asarray(Image.open(path).convert("RGB"))
        assert psnr(decode(path.read_bytes(), name=path.name), expected + 1e-6) > 50


def test_grey_palette_cmyk_16_bit_and_transparent_images_become_rgb():
    image = smooth_image()
    grey = np.asarray(Image.fromarray(image).convert("L"))
    grey_rgb = np.repeat(grey[..., None], 3, axis=2)
    assert np.array_equal(decode(encode(grey, "PNG"), name="x"), grey_rgb)
    assert np.array_equal(decode(encode(grey.astype(np.uint16) * 257, "PNG"), name="x"), grey_rgb)
    palette = Image.fromarray(image).quantize(64)
    assert np.array_equal(
        decode(encode(palette, "PNG"), name="x"), np.asarray(palette.convert("RGB"))
    )
    transparent = np.dstack([image, np.zeros(image.shape[:2], np.uint8)])
    assert np.array_equal(decode(encode(transparent, "PNG"), name="x"), image)
    cmyk = decode(encode(Image.fromarray(image).convert("CMYK"), "JPEG", quality=98), name="x")
    assert psnr(cmyk, image) > 35


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "kind, options", [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})]
)
def test_the_first_frame_or_page_is_taken(kind, options, channels):
    first, *more = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (30, 200)]
    file = encode(first, kind, save_all=True, append_images=more, **options)
    assert np.abs(decode(file, name="x", channels=channels).astype(int) - 30).max() <= 1


def test_a_cmyk_tiff_becomes_rgb():
    image = Image.fromarray(smooth_image())
    assert np.array_equal(decode(encode(image.convert("CMYK"), "TIFF"), name="x"), image)


def test_exif_orientation_is_honoured():
    exif = Image.Exif()
    exif[0x0112] = (
        6  # "the 0th row is the visual right-hand side": shown turned clockwise by 90 degrees
    )
    image = smooth_image()
    turned = decode(encode(image, "JPEG", quality=98, exif=exif), name="x")
    assert turned.shape == (64, 48, 3)
    assert psnr(turned, np.rot90(image, k=-1)) > 30


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "GIF"])
@pytest.mark.parametrize("share", [0.3, 0.7, 0.95])
def test_truncated_images_are_refused_by_name(kind, share):
    whole = encode(smooth_image(), kind)
    with pytest.raises(BadImage, match="^image some/file cannot be read: ."):
        decode(whole[: int(len(whole) * share)], name="some/file")


def test_a_truncated_jpeg_with_a_whole_thumbnail_inside_is_refused():
    thumbnail = encode(smooth_image(12, 16), "JPEG")
    whole = encode(smooth_image(480, 640), "JPEG", exif=b"Exif\0\0" + thumbnail)
    assert decode(whole, name="x").shape == (480, 640, 3)
    with pytest.raises(BadImage, match="its end is missing"):
        decode(whole[: len(whole) * 9 // 10], name="x")


def test_bytes_after_the_end_of_a_jpeg_do_no_harm():
    whole = encode(smooth_image(), "JPEG")
    assert np.array_equal(decode(whole + bytes(1000), name="x"), decode(whole, name="x"))


TRAILERS = {
    "a film": b"\0\0\0\x18ftypmp42" + np.random.default_rng(1).bytes(400_000),
    "an archive": b"PK\3\4" + np.random.default_rng(3).bytes(60_000),
    "an image": encode(smooth_image(seed=1), "JPEG"),
    "an image and a film": encode(smooth_image(seed=1), "JPEG") + b"\xff\xda" * 600,
    "an image that is cut": encode(smooth_image(seed=1), "JPEG")[:-60],
    "a progressive image that is cut": encode(smooth_image(), "JPEG", progressive=True)[:-60],
    "a phone's trailer": b"\0\0\1\x0a\x0e\0\0\0Image_UTC_Data SEFH\0\0SEFT",
}
KINDS = {
    "baseline": {"quality": 95},
    "progressive": {"progressive": True},
    "restarts": {"restart_marker_blocks": 2},
    "a thumbnail": {"exif": b"Exif\0\0" + encode(smooth_image(12, 16), "JPEG")},
}


@pytest.mark.parametrize("trailer", TRAILERS.values(), ids=TRAILERS)
@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS)
def test_a_jpeg_is_read_whatever_follows_it_and_refused_where_its_own_data_is_cut(options, trailer):
    whole = encode(smooth_image(150, 200), "JPEG", **options)
    assert np.array_equal(decode(whole + trailer, name="x"), decode(whole, name="x"))
    for kept in (0.4, 0.7, 0.97):
        with pytest.raises(BadImage, match="its end is missing"):
            decode(whole[: int(len(whole) * kept)] + trailer, name="x")
    with pytest.raises(BadImage, match="its end is missing"):
        decode(whole[:-2] + trailer, name="x")


def test_a_cmyk_jpeg_is_read_whatever_follows_it():
    whole = encode(Image.fromarray(smooth_image()).convert("CMYK"), "JPEG")
    for trailer in (TRAILERS["a film"], TRAILERS["a film"] + b"\xff\xd9"):
        assert np.array_equal(decode(whole + trailer, name="x"), decode(whole, name="x"))


@pytest.mark.parametrize(
    "data, words",
    [
        (b"", "0 bytes"),
        (b"hello world", "no image in a format"),
        (b"\xff\xd8\xff", "its end is missing"),
    ],
)
def test_what_is_no_image_is_refused(data, words):
    with pytest.raises(BadImage, match=words):
        decode(data, name="x")


def test_an_image_that_claims_to_be_enormous_is_refused():
    png = bytearray(encode(smooth_image(), "PNG"))
    png[16:24] = struct.pack(">II", 60_000, 60_000)
    png[29:33] = struct.pack(">I", zlib.crc32(png[12:29]))
    with pytest.raises(BadImage):
        decode(bytes(png), name="x")


def test_the_error_survives_the_way_from_a_worker_process():
    error = pickle.loads(pickle.dumps(BadImage("file.jpg", "it is empty")))
    assert (
        str(error) == "image file.jpg cannot be read: it is empty"
        and (error.name, error.why) == error.args
    )


def test_pixels_are_given_back_unless_of_another_kind():
    image = smooth_image()
    assert decode(image, name="x") is image
    with pytest.raises(BadImage, match="its values go from"):
        decode(image.astype(np.float32), name="x")
