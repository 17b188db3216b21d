"""Images with other numbers than bytes and other channels than three: what they become, and what is
refused with which words.
"""

import dataclasses
import io

import cv2
import numpy as np
import pytest
from PIL import Image, ImageOps

from tests.data.tiff_files import tiff
from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import sources
from vit_jax.data.decoding import decode as decoding
from vit_jax.data.decoding import samples
from vit_jax.data.decoding.decode import BadImage, decode
from vit_jax.data.options import Data
from vit_jax.training.assembly import resolve

RANDOM = np.random.default_rng(0)
BYTES = RANDOM.integers(0, 256, (20, 30, 16), np.uint8)


def npy(array, **options):
    file = io.BytesIO()
    np.lib.format.write_array(file, array, **options)
    return file.getvalue()


def encode(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def as_type(pixels, dtype):
    """The same picture in numbers of another type."""
    if np.issubdtype(dtype, np.floating):
        return (pixels / 255).astype(dtype)
    return pixels.astype(dtype) * 257 if dtype == np.uint16 else pixels.astype(dtype)


FILES = {
    ".npy": npy,
    "TIFF": tiff,
    "TIFF, a plane for each channel": lambda pixels: tiff(pixels, separate=True),
    "deflated TIFF": lambda pixels: tiff(pixels, deflate=True),
}


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("kind", FILES)
@pytest.mark.parametrize("channels", [1, 2, 3, 4, 5, 13, 16])
def test_npy_and_tiff_files_of_any_channels_and_depth_come_back(kind, channels, dtype):
    pixels = BYTES[..., :channels]
    file = FILES[kind](as_type(pixels, dtype))
    assert np.array_equal(decode(file, name="x", channels=channels), pixels)


@pytest.mark.parametrize("separate", [True, False])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_tiff_files_that_store_differences_come_back(dtype, separate):
    pixels = BYTES[..., :5]
    file = tiff(as_type(pixels, dtype), differences=True, deflate=True, separate=separate)
    assert np.array_equal(decode(file, name="x", channels=5), pixels)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
@pytest.mark.parametrize("channels", [1, 3])
def test_tiff_files_that_opencv_writes_come_back(channels, dtype):
    """Compressed by LZW, with differences."""
    pixels = BYTES[..., :channels]
    file = cv2.imencode(".tiff", as_type(pixels, dtype)[..., ::-1])[1].tobytes()
    assert np.array_equal(decode(file, name="x", channels=channels), pixels)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_tiff_files_are_turned_upright(orientation):
    pixels = BYTES[..., :3]
    picture = Image.fromarray(pixels)
    picture.getexif()[0x0112] = orientation
    expected = np.asarray(ImageOps.exif_transpose(picture))
    file = tiff(as_type(pixels, np.uint16), tags={274: orientation})
    assert np.array_equal(decode(file, name="x"), expected)


def test_white_may_be_zero_in_a_tiff():
    file = tiff(as_type(255 - BYTES[..., :1], np.uint16), tags={262: 0})
    assert np.array_equal(decode(file, name="x", channels=1), BYTES[..., :1])


def test_of_16_bits_the_high_byte_is_taken():
    values = np.arange(2**16, dtype=np.uint16).reshape(256, 256)
    png = cv2.imencode(".png", values)[1].tobytes()
    for image in (values, npy(values), tiff(values[..., None]), png):
        assert np.array_equal(decode(image, name="x", channels=1)[..., 0], values >> 8)


@pytest.mark.parametrize("bits", [8, 10, 12, 14, 16])
def test_of_fewer_bits_in_16_the_highest_8_are_taken(bits):
    values = np.arange(2**bits, dtype=np.uint16).reshape(2, -1)
    png = cv2.imencode(".png", values)[1].tobytes()
    size = (2, values.shape[1])
    config = Data(image_size=size, channels=1, max_value=2**bits - 1, eval_crop="resize")
    for image in (values, npy(values), tiff(values[..., None]), png):
        found = decode(image, name="x", channels=1, max_value=2**bits - 1)[..., 0]
        assert np.array_equal(found, values >> bits - 8)
        assert np.array_equal(decoding.eval_crop(image, config, name="x")[..., 0], found)


def test_a_value_above_the_largest_is_refused():
    with pytest.raises(BadImage, match=r"go to 4096, above config\.data\.max_value = 4095"):
        decode(np.uint16([[1, 4096]]), name="x", channels=1, max_value=4095)


def test_images_of_16_bits_that_use_fewer_are_warned_of_once_with_the_option(caplog):
    samples._warned_of.clear()
    for high, max_value in (
        (4000, 0),
        (3000, 0),
        (16384, 0),
        (4000, 65535),
        (4000, 4095),
        (9000, 0),
    ):
        decode(np.uint16([[1, high]]), name="x", channels=1, max_value=max_value)
    advice = [record.getMessage() for record in caplog.records]
    assert [line.split("max_value=")[1].split(",")[0] for line in advice] == ["4095", "16383"]


def test_floats_are_rounded_to_the_nearest_of_255_levels():
    values = np.linspace(0, 1, 1000, dtype=np.float32).reshape(20, 50)
    found = decode(npy(values), name="x", channels=1)[..., 0]
    assert np.abs(found / 255 - values).max() <= 0.5 / 255 + 1e-6


def test_truth_values_and_one_bit_pictures_are_black_and_white():
    values = BYTES[..., :1] > 100
    expected = values * np.uint8(255)
    picture = Image.fromarray(values[..., 0])
    for image in (npy(values), values, encode(picture, "PNG"), encode(picture, "TIFF")):
        assert np.array_equal(decode(image, name="x", channels=1), expected)


@pytest.mark.parametrize(
    "values, words",
    [
        (np.float32([[0, 255]]), "its values go from 0 to 255: floats must lie within 0 .* and 1"),
        (np.float32([[-0.5, 0.5]]), "its values go from -0.5 to 0.5"),
        (np.float64([[0, np.nan]]), "its values go from nan to nan"),
        (np.uint16([[0, 255]]), "go to 255 of 65535, .* would become black"),
        (np.int32([[1, 2]]), "it holds int32: store uint8, uint16, or floats within 0 and 1"),
        (np.zeros((2, 2, 2, 2), np.uint8), r"its shape \(2, 2, 2, 2\) is not \(height, width, ch"),
        (np.zeros((0, 2), np.uint8), r"its shape \(0, 2, 1\) is not"),
        (
            np.zeros((5, 20, 30), np.uint8),
            r"30 channels \(its shape is \(5, 20, 30\)\), and config",
        ),
    ],
)
def test_numbers_that_would_not_be_a_picture_are_refused(values, words):
    for image in (values, npy(values)):
        with pytest.raises(BadImage, match=f"^image x cannot be read: .*{words}"):
            decode(image, name="x", channels=5 if values.ndim == 3 else 1)


@pytest.mark.parametrize(
    "file, words",
    [
        (
            tiff(np.zeros((9, 9, 2), np.int16)),
            "signed numbers of 16 bits: store unsigned ones of 8",
        ),
        (tiff(np.zeros((9, 9, 2), np.uint32)), "unsigned numbers of 32 bits"),
        (tiff(BYTES[..., :2], tags={259: 7}), "compression 7 is not read .*LZW, deflate"),
        (tiff(np.zeros((9, 9, 2), np.float32), tags={317: 3}), "predictor 3 is not read"),
        (tiff(BYTES[..., :2], tags={257: 2**20}), "bytes cannot hold the 1048576 x 30 pixels"),
        (tiff(BYTES[..., :2], tags={273: 10**6}), "its data is damaged"),
        (tiff(BYTES[..., :2])[:700], "its end is missing"),
        (npy(BYTES)[:5000], "no whole .npy file"),
        (npy(np.array([["a"]], object), allow_pickle=True), "no whole .npy file of numbers"),
        (b"\x93NUMPY\x09\x00", "no whole .npy file"),
    ],
)
def test_files_that_cannot_be_read_are_refused_with_the_reason(file, words):
    with pytest.raises(BadImage, match=f"^image x cannot be read: .*{words}"):
        decode(file, name="x", channels=2)


def test_grey_and_colours_become_each_other():
    colors = BYTES[..., :3]
    grey = np.asarray(Image.fromarray(colors).convert("L"))
    for image in (colors, npy(colors)):
        assert np.array_equal(decode(image, name="x", channels=1)[..., 0], grey)
    for image in (grey, npy(grey), encode(Image.fromarray(grey), "PNG")):
        assert np.array_equal(decode(image, name="x"), np.repeat(grey[..., None], 3, axis=2))
    for kind in ("PNG", "TIFF"):
        found = decode(encode(Image.fromarray(colors), kind), name="x", channels=1)
        assert found.shape == (20, 30, 1) and np.abs(found[..., 0] - grey.astype(int)).max() <= 1


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_png_with_alpha_has_two_channels_or_four(dtype):
    pixels = BYTES[..., :4]
    file = cv2.imencode(".png", as_type(pixels, dtype)[..., [2, 1, 0, 3]])[1].tobytes()
    assert np.array_equal(decode(file, name="x", channels=4), pixels)
    assert np.array_equal(decode(file, name="x"), pixels[..., :3])
    grey = Image.fromarray(pixels[..., :2], mode="LA") if dtype == np.uint8 else None
    if grey:
        assert np.array_equal(decode(encode(grey, "PNG"), name="x", channels=2), pixels[..., :2])


@pytest.mark.parametrize(
    "file, channels, words",
    [
        (
            encode(Image.fromarray(BYTES[..., :3]), "PNG"),
            4,
            "it has 3 channels .*data.channels is 4",
        ),
        (
            encode(Image.fromarray(BYTES[..., :3]), "JPEG"),
            4,
            "only PNG, TIFF and .npy files have that",
        ),
        (tiff(BYTES[..., :5]), 3, "it has 5 channels .*data.channels is 3"),
        (tiff(BYTES[..., :4]), 3, "it has 4 channels .*data.channels is 3"),
        (npy(BYTES[..., :4]), 3, "it has 4 channels .*data.channels is 3"),
    ],
)
def test_channels_are_never_dropped_without_a_word(file, channels, words):
    with pytest.raises(BadImage, match=words):
        decode(file, name="x", channels=channels)


def test_of_an_rgb_tiff_with_alpha_the_colours_are_taken():
    for dtype in (np.uint8, np.uint16):
        file = tiff(as_type(BYTES[..., :4], dtype), tags={262: 2, 338: 2})
        assert np.array_equal(decode(file, name="x"), BYTES[..., :3])
        assert np.array_equal(decode(file, name="x", channels=4), BYTES[..., :4])


@pytest.mark.parametrize("channels", [1, 2, 5, 16])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(7, 11), (40, 50)])
def test_every_channel_is_cut_and_resized_alike(channels, size, interpolation):
    data = Data(
        image_size=size, channels=channels, eval_crop="resize", train_crop="resize",
        interpolation=interpolation,
    )  # fmt: skip
    method = Image.Resampling[interpolation.upper()]
    for found in (
        decoding.eval_crop(npy(BYTES[..., :channels]), data, name="x"),
        decoding.train_crop(BYTES[..., :channels], data, (), name="x"),
    ):
        assert found.shape == (*size, channels)
        for channel in range(channels):
            plane = Image.fromarray(BYTES[..., channel].copy())
            assert np.array_equal(found[..., channel], plane.resize(size[::-1], method))


@pytest.mark.parametrize("subsampling", ["4:4:4", "4:2:0"])
def test_one_channel_of_a_jpeg_is_its_luma(subsampling):
    picture = Image.fromarray(cv2.resize(BYTES[:6, :8, :3], (300, 200)))
    file = encode(picture, "JPEG", quality=95, subsampling=subsampling)
    data = Data(image_size=64, channels=1, eval_crop="resize")
    found = decoding.eval_crop(file, data, name="x")
    luma = Image.open(io.BytesIO(file)).convert("L").resize((64, 64), Image.Resampling.BILINEAR)
    assert np.abs(found[..., 0] - np.asarray(luma).astype(int)).max() <= 2


def test_a_grey_jpeg_has_one_channel():
    picture = Image.fromarray(BYTES[..., 0].copy())
    file = encode(picture, "JPEG", quality=95)
    whole = np.asarray(Image.open(io.BytesIO(file)))
    data = Data(image_size=(20, 30), channels=1, eval_crop="resize")
    assert np.abs(decoding.eval_crop(file, data, name="x")[..., 0] - whole.astype(int)).max() <= 1


def test_the_config_of_a_run_has_a_mean_and_a_std_for_each_channel():
    config = default_config()
    config.data.channels = 5
    data = resolve(config).data
    assert data.mean == data.std == (0.5,) * 5
    config.augment.color_jitter = 0.3
    with pytest.raises(ConfigError, match="color_jitter changes the colours"):
        resolve(config)
    config.augment.color_jitter, config.data.std = 0.0, (0.2, 0.3)
    with pytest.raises(ConfigError, match=r"config.data.std = \(0.2, 0.3\) has 2 numbers"):
        resolve(config)


def test_a_folder_of_npy_files_is_a_data_set(tmp_path):
    for i in range(6):
        path = tmp_path / "ab"[i % 2] / f"{i}.npy"
        path.parent.mkdir(exist_ok=True)
        np.save(path, np.full((9, 8, 13), i, np.uint8))
    data = Data(name="folder", path=str(tmp_path), holdout=0.0, channels=13, image_size=(4, 6))
    record = sources.open_train(data)[3]
    found = decoding.eval_crop(
        record.image, dataclasses.replace(data, eval_crop="resize"), name="x"
    )
    assert found.shape == (4, 6, 13) and (found == 1).all() and record.name.endswith("b/1.npy")
