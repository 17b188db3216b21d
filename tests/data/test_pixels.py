"""The pixels of crops of JPEG files, against Pillow's: decoded whole and resized by an antialiased
filter, without reducing first.
"""

import io

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from vit_jax.data import crops
from vit_jax.data.decoding import decode, images, jpeg, resize
from vit_jax.data.options import Data

SAMPLINGS = {
    "4:4:4": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_444,
    "4:2:2": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_422,
    "4:2:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_420,
    "4:4:0": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_440,
    "4:1:1": cv2.IMWRITE_JPEG_SAMPLING_FACTOR_411,
}


def jpeg_of(picture: Image.Image, **options) -> bytes:
    file = io.BytesIO()
    picture.save(file, "JPEG", **({"quality": 92} | options))
    return file.getvalue()


def photo(height, width, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (height // 9 + 2, width // 9 + 2, 3))
    return Image.fromarray(noise.astype(np.uint8)).resize((width, height), Image.Resampling.BICUBIC)


def exact(file: bytes, part, size: int, interpolation: str) -> np.ndarray:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(file))).convert("RGB")
    (top, left, bottom, right), inside = part(image.height, image.width)
    method, box = Image.Resampling[interpolation.upper()], (left, top, right, bottom)
    if inside:
        return np.asarray(image.crop(box).resize((size, size), method))
    return np.asarray(image.resize((size, size), method, box=box))


def psnr(a, b) -> float:
    return 10 * np.log10(255**2 / max(np.mean((a.astype(np.float64) - b) ** 2), 1e-3))


def differences(file: bytes, seed: int, size: int, interpolation: str) -> list[float]:
    """PSNR of a training and an evaluation crop to the exact ones."""
    data = Data(image_size=size, eval_resize=round(size * 8 / 7), interpolation=interpolation)
    draws = np.random.default_rng(seed).random(crops.DRAWS).tolist()
    return [
        psnr(
            decode.train_crop(file, data, draws, name="x"),
            exact(file, lambda h, w: crops.train_part(h, w, data, draws), size, interpolation),
        ),
        psnr(
            decode.eval_crop(file, data, name="x"),
            exact(file, lambda h, w: crops.eval_part(h, w, data), size, interpolation),
        ),
    ]


@pytest.fixture(scope="module")
def files(shared_data):
    return [p.read_bytes() for p in sorted((shared_data / "imagenet_sample").glob("*.JPEG"))]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_of_224_pixels_are_within_40_db_of_exact_ones(files, interpolation):
    found = [differences(file, i, 224, interpolation) for i, file in enumerate(files[::5])]
    assert np.min(found) >= 40 and np.mean(found) > 60


def assert_small_crops_are_close(files, size, interpolation):
    found = {}
    for i, file in enumerate(files):
        pixels = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
        for name, factors in SAMPLINGS.items():
            options = [cv2.IMWRITE_JPEG_SAMPLING_FACTOR, factors]
            again = cv2.imencode(".jpg", pixels, options)[1].tobytes()
            found.setdefault(name, []).extend(differences(again, i, size, interpolation))
    worst = {name: min(values) for name, values in found.items()}
    assert min(worst.values()) >= 37, worst


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [32, 97])
def test_small_crops_are_within_37_db_for_every_chroma_sampling(files, size, interpolation):
    assert_small_crops_are_close(files[::40], size, interpolation)


@pytest.mark.slow
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [32, 48, 64, 80, 97, 160, 224])
def test_nor_does_any_crop_of_all_photos_differ_more(files, size, interpolation):
    assert_small_crops_are_close(files, size, interpolation)


def test_a_crop_that_is_not_scaled_is_pillows_bit_for_bit(files):
    assert min(differences(files[0], 0, 224, "bilinear")) > 70  # 78 dB: no difference


@pytest.mark.parametrize("scale", [1, 2, 4, 8])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_jpeg_is_turned_upright_at_every_scale(orientation, scale):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = jpeg_of(photo(30, 50).resize((203, 120)), exif=exif, quality=98)
    header = jpeg.read_header(file, "x")
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file)))
    assert header.upright == (upright.height, upright.width)
    found = jpeg.decode(file, header, scale, 3)
    assert found.shape[:2] == tuple(-(-side // scale) for side in header.upright)
    expected = np.asarray(upright.resize(found.shape[1::-1], Image.Resampling.BOX))
    assert psnr(found, expected) > 25


@pytest.mark.parametrize("width", [1600, 1603])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_crops_of_turned_photos_are_close_to_exact_ones(orientation, width):
    exif = Image.Exif()
    exif[0x0112] = orientation
    file = jpeg_of(photo(1200, width), exif=exif)
    assert min(differences(file, orientation, 64, "bilinear")) > 40


def test_a_large_part_is_decoded_at_a_fraction_of_its_size():
    part = (0, 0, 1200, 1600), True
    assert [resize.jpeg_scale(part, side, side, "bilinear") for side in (32, 64, 224, 600)] == [
        8, 8, 2, 1
    ]  # fmt: skip
    file = jpeg_of(photo(1200, 1600))
    assert min(differences(file, 3, 64, "bilinear")) > 40


@pytest.mark.parametrize(
    "options", [{"progressive": True}, {"restart_marker_rows": 1}, {"optimize": True}], ids=str
)
def test_other_kinds_of_jpeg_are_decoded_as_by_pillow(options):
    file = jpeg_of(photo(90, 120), **options)
    whole = np.asarray(Image.open(io.BytesIO(file)))
    assert np.array_equal(decode.decode(file, name="x"), whole)


def test_grey_and_cmyk_jpegs_become_rgb():
    for mode in ("L", "CMYK"):
        file = jpeg_of(photo(90, 120).convert(mode), quality=98)
        expected = np.asarray(Image.open(io.BytesIO(file)).convert("RGB"))
        found = decode.decode(file, name="x")
        assert found.shape == (90, 120, 3) and psnr(found, expected) > 35
        data = Data(image_size=8, eval_crop="resize")
        assert decode.eval_crop(file, data, name="x").shape == (8, 8, 3)


def test_an_image_of_a_few_pixels_is_cut():
    for height, width in ((1, 1), (2, 3), (8, 300), (17, 16)):
        file = jpeg_of(photo(height, width))
        data = Data(image_size=1, eval_crop="resize")
        found = decode.eval_crop(file, data, name="x").astype(int)
        assert np.abs(found - decode.decode(file, name="x").mean((0, 1))).max() < 40
    assert images.check_image(file, "x", 17 * 16).kind == images.JPEG
