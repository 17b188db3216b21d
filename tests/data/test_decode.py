import io
import pickle
import struct
import zlib

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import crops
from vit_jax.data.decode import BadImage, decode, eval_crop, resize, train_crop


def data_config(**fields):
    config = default_config().data
    config.update(fields)
    return config


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


def draws(seed=0):
    return np.random.default_rng(seed).random(crops.DRAWS).tolist()


def train(image, config, seed=0):
    return train_crop(image, config, draws(seed), name="x")


@pytest.fixture(scope="module")
def photos(shared_data):
    return [
        decode(p.read_bytes(), name=p.name)
        for p in sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:24]
    ]


# decode


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


def test_the_first_frame_of_an_animation_is_taken():
    frames = [Image.fromarray(np.full((8, 8, 3), value, np.uint8)) for value in (30, 200)]
    gif = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.abs(decode(gif, name="x").astype(int) - 30).max() <= 1


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
    with pytest.raises(BadImage, match="uint8 is needed"):
        decode(image.astype(np.float32), name="x")


# crops for training


def coordinates(height, width):
    """An image whose pixels say where they are: red is the column, green the row."""
    down, across = np.mgrid[:height, :width]
    return np.dstack([across, down, np.zeros_like(down)]).astype(np.uint8)


def test_inception_crops_have_uniform_area_and_log_uniform_aspect_within_bounds():
    config = data_config(image_size=8, crop_area=(0.05, 0.4), crop_aspect=(0.5, 2.0))
    # The outermost pixels of the result would see an edge: 5 of its 8 lie between the next ones.
    image, count, areas, ratios = coordinates(250, 250), 1500, [], []
    for seed in range(count):
        crop = train(image, config, seed).astype(float)
        width = (crop[1, -2, 0] - crop[1, 1, 0]) * 8 / 5
        height = (crop[-2, 1, 1] - crop[1, 1, 1]) * 8 / 5
        areas.append(width * height / 250**2)
        ratios.append(width / height)
    assert min(areas) > 0.04 and max(areas) < 0.42 and min(ratios) > 0.47 and max(ratios) < 2.15
    assert abs(np.mean(areas) - 0.225) < 4 * 0.35 / np.sqrt(12 * count)
    assert abs(np.mean(np.log(ratios))) < 4 * np.log(4) / np.sqrt(12 * count)
    assert abs(np.std(np.log(ratios)) - np.log(4) / np.sqrt(12)) < 0.03


def test_an_inception_crop_that_never_fits_is_the_largest_central_part():
    config = data_config(image_size=30, crop_area=(1.0, 1.0), crop_aspect=(3 / 4, 4 / 3))
    whole = data_config(image_size=30, train_crop="resize")
    image = coordinates(30, 200)
    assert np.array_equal(train(image, config), train(image[:, 80:120], whole))


def test_random_crops_are_squares_of_the_image_with_its_smaller_side_resized():
    config = data_config(train_crop="random", resize=40, image_size=32)
    image = coordinates(40, 80)
    corners = set()
    for crop in (train(image, config, seed) for seed in range(300)):
        x, y = crop[0, 0, :2].tolist()
        assert np.array_equal(crop, image[y : y + 32, x : x + 32])
        corners.add((x, y))
    assert {y for _, y in corners} == set(range(9)) and {0, 48} <= {x for x, _ in corners} <= set(
        range(49)
    )


def test_pad_crops_are_cut_from_the_image_with_a_black_border():
    config = data_config(train_crop="pad", pad=4, image_size=32)
    image = smooth_image(32, 32)
    padded = np.zeros((40, 40, 3), np.uint8)
    padded[4:36, 4:36] = image
    possible = {padded[y : y + 32, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    found = {train(image, config, seed).tobytes() for seed in range(600)}
    assert found == possible


@pytest.mark.parametrize("crop", ["inception", "random", "pad", "resize"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 300), (300, 1), (37, 500), (64, 64)])
def test_every_training_crop_of_every_shape_is_a_square_of_bytes(crop, shape):
    config = data_config(train_crop=crop, image_size=32, resize=40)
    first, again, _ = (train(smooth_image(*shape), config, seed) for seed in (1, 1, 2))
    assert first.shape == (32, 32, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)


def test_training_crops_of_real_images_are_close_to_antialiased_ones(photos):
    config = data_config(train_crop="resize")
    found = []
    for photo in photos:
        reference = np.asarray(Image.fromarray(photo).resize((224, 224), Image.Resampling.BILINEAR))
        found.append(psnr(train(photo, config), reference))
    assert np.mean(found) > 40 and min(found) > 32


def test_a_side_that_shrinks_is_averaged_even_if_the_other_grows():
    stripes = np.zeros((16, 400, 3), np.uint8)
    stripes[:, ::2] = 200
    assert np.abs(resize(stripes, 32, 40).astype(int) - 100).max() <= 1


# crops for evaluation


def triangle_matrix(size_in, size_out):
    """(size_out, size_in) float64 weights of the antialiased bilinear filter: a triangle two output
    pixels wide.
    """
    scale = max(size_in / size_out, 1)
    centres = (np.arange(size_out)[:, None] + 0.5) * size_in / size_out - 0.5
    weights = np.maximum(0, 1 - np.abs(np.arange(size_in) - centres) / scale)
    return weights / weights.sum(axis=1, keepdims=True)


def test_central_crops_of_real_images_are_antialiased_bilinear(photos):
    config = data_config(image_size=224, eval_resize=256)
    for photo in photos:
        scale = 256 / min(photo.shape[:2])
        height, width = round(photo.shape[0] * scale), round(photo.shape[1] * scale)
        down, across = (
            triangle_matrix(photo.shape[0], height),
            triangle_matrix(photo.shape[1], width),
        )
        top, left = (height - 224) // 2, (width - 224) // 2
        whole = np.einsum(
            "yi,xj,ijc->yxc", down[top : top + 224], across[left : left + 224], photo, optimize=True
        )
        assert psnr(eval_crop(photo, config, name="x"), whole) > 50


def test_a_central_crop_is_the_middle_of_the_resized_image(photos):
    photo = photos[0]
    scale = 256 / min(photo.shape[:2])
    size = round(photo.shape[1] * scale), round(photo.shape[0] * scale)
    whole = np.asarray(Image.fromarray(photo).resize(size, Image.Resampling.BILINEAR))
    top, left = (size[1] - 224) // 2, (size[0] - 224) // 2
    found = eval_crop(photo, data_config(), name="x").astype(int)
    assert np.abs(found - whole[top : top + 224, left : left + 224]).max() <= 1


@pytest.mark.parametrize("crop", ["central", "resize"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 300), (333, 500), (500, 333), (71, 53)])
def test_every_evaluation_crop_of_every_shape_is_a_square_of_bytes(crop, shape):
    config = data_config(eval_crop=crop, image_size=64, eval_resize=64)
    found = eval_crop(smooth_image(*shape), config, name="x")
    assert found.shape == (64, 64, 3) and found.dtype == np.uint8


def test_resized_evaluation_images_show_the_whole_image():
    image = smooth_image(64, 64)
    config = data_config(eval_crop="resize", image_size=64)
    assert np.array_equal(eval_crop(image, config, name="x"), image)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"train_crop": "random", "resize": 200},
            "config.data.resize = 200 is smaller than config.data.image_size",
        ),
        ({"eval_resize": 200}, "config.data.eval_resize = 200 is smaller"),
        ({"crop_area": (0.5, 0.2)}, "config.data.crop_area"),
        ({"crop_area": (0.0, 1.0)}, "config.data.crop_area"),
        ({"crop_aspect": (0.0, 1.0)}, "config.data.crop_aspect"),
    ],
)
def test_crops_that_cannot_be_cut_are_refused(fields, words):
    crops.check(data_config())
    with pytest.raises(ConfigError) as raised:
        crops.check(data_config(**fields))
    assert words in str(raised.value)
