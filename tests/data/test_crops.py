"""Which parts are cut out of images, and that they are resized as they should be."""

import cv2
import numpy as np
import pytest
from PIL import Image

from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import crops
from vit_jax.data.decoding.decode import decode, eval_crop, train_crop


def data_config(**fields):
    config = default_config().data
    config.update(fields)
    return config


def smooth_image(height=48, width=64, seed=0):
    noise = np.random.default_rng(seed).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return cv2.resize(noise, (width, height), interpolation=cv2.INTER_CUBIC)


def psnr(a, b):
    with np.errstate(divide="ignore"):  # infinite of equal images
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


def test_inception_crops_keep_shapes_up_to_the_aspect_ratio_whatever_the_targets():
    """A part that is not stretched has the target's own ratio."""
    image, ratios = coordinates(250, 250), []
    config = data_config(image_size=(8, 16), crop_area=(0.05, 0.3), crop_aspect=(0.8, 1.25))
    for seed in range(300):
        (top, left, bottom, right), _ = crops.train_part(*image.shape[:2], config, draws(seed))
        ratios.append((right - left) / (bottom - top))
    assert 1.55 < min(ratios) < 1.7 and 2.4 < max(ratios) < 2.6


@pytest.mark.parametrize(
    "image, side, size, room", [((40, 80), 40, (32, 32), 49), ((24, 40), 20, (16, 32), 9)]
)
def test_random_crops_are_parts_of_the_image_resized_to_cover_the_frame(image, side, size, room):
    config = data_config(train_crop="random", resize=side, image_size=size)
    image, corners = coordinates(*image), set()
    for crop in (train(image, config, seed) for seed in range(300)):
        x, y = crop[0, 0, :2].tolist()
        assert np.array_equal(crop, image[y : y + size[0], x : x + size[1]])
        corners.add((x, y))
    assert {y for _, y in corners} == set(range(9))
    assert {0, room - 1} <= {x for x, _ in corners} <= set(range(room))


def test_pad_crops_are_cut_from_the_image_with_a_black_border():
    config = data_config(train_crop="pad", pad=4, image_size=(24, 32))
    image = smooth_image(24, 32)
    padded = np.zeros((32, 40, 3), np.uint8)
    padded[4:28, 4:36] = image
    possible = {padded[y : y + 24, x : x + 32].tobytes() for y in range(9) for x in range(9)}
    found = {train(image, config, seed).tobytes() for seed in range(600)}
    assert found == possible


@pytest.mark.parametrize("size", [(32, 32), (24, 48), (40, 16)])
@pytest.mark.parametrize("crop", ["inception", "random", "pad", "resize"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 300), (300, 1), (37, 500), (64, 64)])
def test_training_crops_of_every_image_have_the_target_size(crop, shape, size):
    config = data_config(train_crop=crop, image_size=size, resize=40)
    first, again, _ = (train(smooth_image(*shape), config, seed) for seed in (1, 1, 2))
    assert first.shape == (*size, 3) and first.dtype == np.uint8
    assert np.array_equal(first, again)


def test_training_crops_of_real_images_are_close_to_antialiased_ones(photos):
    config = data_config(train_crop="resize")
    found = []
    for photo in photos:
        reference = np.asarray(Image.fromarray(photo).resize((224, 224), Image.Resampling.BILINEAR))
        found.append(psnr(train(photo, config), reference))
    assert np.mean(found) > 50 and min(found) > 45


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


@pytest.mark.parametrize("size", [(64, 64), (32, 80), (70, 64)])
@pytest.mark.parametrize("crop", ["central", "resize"])
@pytest.mark.parametrize("shape", [(8, 8), (1, 300), (333, 500), (500, 333), (71, 53)])
def test_evaluation_crops_of_every_image_have_the_target_size(crop, shape, size):
    config = data_config(eval_crop=crop, image_size=size, eval_resize=64)
    found = eval_crop(smooth_image(*shape), config, name="x")
    assert found.shape == (*size, 3) and found.dtype == np.uint8


@pytest.mark.parametrize(
    "image, resized",
    [((100, 100), (128, 128)), ((100, 300), (64, 192)), ((300, 100), (384, 128)), ((50, 100), (64, 128))],
)  # fmt: skip
def test_a_central_crop_covers_a_frame_of_the_targets_aspect_ratio(image, resized):
    """The target is 40 × 80, so that a frame whose smaller side is 64 is 64 × 128."""
    pixels = smooth_image(*image)
    config = data_config(image_size=(40, 80), eval_resize=64)
    whole = Image.fromarray(pixels).resize(resized[::-1], Image.Resampling.BILINEAR)
    top, left = (resized[0] - 40) // 2, (resized[1] - 80) // 2
    expected = np.asarray(whole).astype(int)[top : top + 40, left : left + 80]
    assert np.abs(eval_crop(pixels, config, name="x") - expected).max() <= 1


def test_resized_evaluation_images_show_the_whole_image():
    image = smooth_image(64, 64)
    config = data_config(eval_crop="resize", image_size=64)
    assert np.array_equal(eval_crop(image, config, name="x"), image)


@pytest.mark.parametrize(
    "fields, words",
    [
        (
            {"train_crop": "random", "resize": 200},
            "config.data.resize = 200 is smaller than config.data.image_size = 224: nothing",
        ),
        (
            {"image_size": (224, 448), "eval_resize": 223},
            "eval_resize = 223 is smaller than config.data.image_size = 224x448: nothing of that size",
        ),
        ({"eval_resize": 200}, "config.data.eval_resize = 200 is smaller"),
        ({"crop_area": (0.5, 0.2)}, "config.data.crop_area"),
        ({"crop_area": (0.0, 1.0)}, "config.data.crop_area"),
        ({"crop_aspect": (0.0, 1.0)}, "config.data.crop_aspect"),
    ],
)
def test_crops_that_cannot_be_cut_are_refused(fields, words):
    crops.check_crops(data_config())
    with pytest.raises(ConfigError) as raised:
        crops.check_crops(data_config(**fields))
    assert words in str(raised.value)
