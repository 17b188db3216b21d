"""RandAugment against Pillow and against plain NumPy loops."""

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageEnhance
import PIL.ImageOps
import pytest
import scipy.stats
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from vit_jax.data.augmentation import randaugment as ra

HEIGHT, WIDTH = 37, 30
FACTORS = (0.1, 0.7, 1.0, 1.9, 3.7)


def pillow(function, images):
    return np.stack([np.asarray(function(PIL.Image.fromarray(image))) for image in images])


def run(function, images, *args):
    """Called under jit, with Python numbers as constants, as in the training step; arrays are
    arguments.
    """
    out = jax.jit(lambda images: function(images, *args))(images)
    assert out.dtype == jnp.uint8 and out.shape == images.shape
    return np.asarray(out)


def difference(a, b):
    return np.abs(a.astype(int) - b.astype(int)).max()


def test_invert_equalize_posterize_and_solarize_equal_pillow(images):
    np.testing.assert_array_equal(run(ra.invert, images), pillow(PIL.ImageOps.invert, images))
    np.testing.assert_array_equal(run(ra.equalize, images), pillow(PIL.ImageOps.equalize, images))
    for bits in range(1, 9):
        expected = pillow(lambda image, b=bits: PIL.ImageOps.posterize(image, b), images)
        np.testing.assert_array_equal(run(ra.posterize, images, bits), expected)
    for threshold in (0, 77, 128, 255, 256, 512):
        expected = pillow(lambda image, t=threshold: PIL.ImageOps.solarize(image, t), images)
        np.testing.assert_array_equal(run(ra.solarize, images, threshold), expected)


def test_equalize_of_a_real_photograph_equals_pillow(shared_data):
    path = sorted(p for p in shared_data.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg"))[0]
    photograph = np.asarray(PIL.Image.open(path).convert("RGB").resize((160, 120)))[None]
    np.testing.assert_array_equal(
        run(ra.equalize, photograph), pillow(PIL.ImageOps.equalize, photograph)
    )


def test_autocontrast_is_the_exact_quotient_rounded_down_and_within_one_of_pillow(images):
    expected = images.copy()
    for image in expected:
        for c in range(3):
            low, high = int(image[..., c].min()), int(image[..., c].max())
            if high > low:
                image[..., c] = 255 * (image[..., c].astype(int) - low) // (high - low)
    actual = run(ra.autocontrast, images)
    np.testing.assert_array_equal(actual, expected)
    assert difference(actual, pillow(PIL.ImageOps.autocontrast, images)) <= 1


def test_posterize_to_zero_bits_is_black(images):
    assert not run(ra.posterize, images, 0).any()


def test_solarize_add_brightens_the_dark_half_only(images):
    for addition in (0, 50, 110, 220):
        expected = np.where(images < 128, np.minimum(images.astype(int) + addition, 255), images)
        np.testing.assert_array_equal(run(ra.solarize_add, images, addition), expected)


@pytest.mark.parametrize("factor", FACTORS)
def test_brightness_equals_pillow(images, factor):
    expected = pillow(lambda image: PIL.ImageEnhance.Brightness(image).enhance(factor), images)
    assert_blend(run(ra.brightness, images, factor), 0.0, images.astype(np.float64), factor)
    assert difference(run(ra.brightness, images, factor), expected) <= 1


@pytest.mark.parametrize("factor", FACTORS)
def test_color_and_sharpness_equal_numpy_and_are_near_pillow(images, factor):
    exact = images.astype(np.float64)
    # Pillow rounds grey and blur to the nearest, TensorFlow down: one level, times |1 - factor|
    # after the blend.
    tolerance = np.ceil(abs(1 - factor)) + 1

    grey = np.floor(exact @ np.array([0.2989, 0.587, 0.114]) / 255 * 255.5)[..., None]
    actual = run(ra.color, images, factor)
    assert_blend(actual, grey, exact, factor)
    assert (
        difference(
            actual, pillow(lambda image: PIL.ImageEnhance.Color(image).enhance(factor), images)
        )
        <= tolerance
    )

    blur = exact.copy()
    for y in range(1, HEIGHT - 1):
        for x in range(1, WIDTH - 1):
            window = images[:, y - 1 : y + 2, x - 1 : x + 2].astype(int)
            blur[:, y, x] = (window.sum((1, 2)) + 4 * window[:, 1, 1]) // 13
    actual = run(ra.sharpness, images, factor)
    assert_blend(actual, blur, exact, factor)
    expected = pillow(lambda image: PIL.ImageEnhance.Sharpness(image).enhance(factor), images)
    assert difference(actual, expected) <= tolerance


@pytest.mark.parametrize("factor", FACTORS)
def test_contrast_blends_from_the_number_of_pixels_over_256(images, factor):
    assert_blend(
        run(ra.contrast, images, factor), HEIGHT * WIDTH // 256, images.astype(np.float64), factor
    )


def test_contrast_blends_from_grey_196_at_224_pixels():
    grey = np.full((1, 224, 224, 3), 196, np.uint8)
    np.testing.assert_array_equal(run(ra.contrast, grey, 0.1), grey)


def assert_blend(actual, start, images, factor):
    """Float64 blend, cut to integers; float32 may fall on the other side of a whole number only."""
    exact = np.clip(start + factor * (images - start), 0, 255)
    low, high = np.floor(exact - 1e-3), np.floor(exact + 1e-3)
    assert ((actual >= low) & (actual <= high)).all()


def transformed(image, matrix):
    """Nearest neighbour by loops in float64: `matrix` (2, 3) takes the result's (x, y, 1) to the
    image's (x, y).

    Returns the result and where it is beyond doubt: away from halves, where float32 may round to
    the other side.
    """
    height, width, _ = image.shape
    result, certain = np.full_like(image, 128), np.ones((height, width), bool)
    for y in range(height):
        for x in range(width):
            u, v = matrix @ np.array([x, y, 1.0])
            certain[y, x] = min(abs(u % 1 - 0.5), abs(v % 1 - 0.5)) > 1e-4
            column, row = round(u), round(v)
            if 0 <= row < height and 0 <= column < width:
                result[y, x] = image[row, column]
    return result, certain


@pytest.mark.parametrize(
    "function, matrix",
    [
        (ra.shear_x, lambda a: np.array([[1, a, 0], [0, 1, 0]])),
        (ra.shear_y, lambda a: np.array([[1, 0, 0], [a, 1, 0]])),
        (ra.translate_x, lambda a: np.array([[1, 0, a * WIDTH], [0, 1, 0]])),
        (ra.translate_y, lambda a: np.array([[1, 0, 0], [0, 1, a * HEIGHT]])),
    ],
    ids=["shear_x", "shear_y", "translate_x", "translate_y"],
)
def test_geometric_operations_take_the_nearest_pixel_or_grey(images, function, matrix):
    amounts = np.array([0.0, 0.3, -0.3, 0.123, -0.617, 1.1], np.float32)
    actual = run(function, images, amounts)
    for image, result, amount in zip(images, actual, amounts, strict=True):
        expected, certain = transformed(image, matrix(float(amount)))
        assert certain.mean() > 0.85
        np.testing.assert_array_equal(result[certain], expected[certain])
    np.testing.assert_array_equal(actual[0], images[0])


@pytest.mark.parametrize("height, width", [(37, 30), (30, 37), (16, 16), (10, 45), (45, 10)])
def test_rotate_takes_each_pixel_once_and_from_at_most_one_beside_the_nearest(height, width):
    """Of images that hold their coordinates."""
    y, x = np.mgrid[:height, :width]
    degrees = np.array([0, 3, -8.5, 30, -45, 81, 110, 180, -170], np.float32)
    codes = np.broadcast_to(np.stack([y, x, 0 * x], -1), (len(degrees), height, width, 3))
    actual = run(ra.rotate, codes.astype(np.uint8), degrees)
    for image, angle in zip(actual, np.radians(degrees.astype(float)), strict=True):
        to_x, to_y = x - (width - 1) / 2, y - (height - 1) / 2
        exact_x = np.cos(angle) * to_x - np.sin(angle) * to_y + (width - 1) / 2
        exact_y = np.sin(angle) * to_x + np.cos(angle) * to_y + (height - 1) / 2
        found = image[..., 2] == 0  # not the fill
        assert (np.abs(image[..., 1] - exact_x)[found] <= 1.5 + 1e-3).all()
        assert (np.abs(image[..., 0] - exact_y)[found] <= 1.5 + 1e-3).all()
        depth = np.minimum(
            np.minimum(exact_x, width - 1 - exact_x), np.minimum(exact_y, height - 1 - exact_y)
        )
        assert found[depth > 1.5].all() and not found[depth < -1.5 - 1e-3].any()
        assert len(np.unique(image[found], axis=0)) == found.sum()
    np.testing.assert_array_equal(actual[0], codes[0])
    np.testing.assert_array_equal(actual[7], codes[7, ::-1, ::-1])


def test_rotate_by_positive_degrees_is_counter_clockwise_as_in_pillow():
    image = np.zeros((1, 31, 31, 3), np.uint8)
    image[0, 15, 20:] = 255  # a hand that points to the right
    turned = run(ra.rotate, image, np.float32([90]))
    np.testing.assert_array_equal(turned[0], np.asarray(PIL.Image.fromarray(image[0]).rotate(90)))


def test_cutout_fills_a_box_cut_off_at_the_border(images):
    y, x = np.array([0, 5, 18, 36, 20, 3]), np.array([0, 29, 15, 2, 10, 27])
    expected = images.copy()
    for image, cy, cx in zip(expected, y, x, strict=True):
        image[max(cy - 6, 0) : cy + 6, max(cx - 4, 0) : cx + 4] = 128
    np.testing.assert_array_equal(run(ra.cutout, images, y, x, (6, 4)), expected)


def test_magnitude_0_is_not_nothing(images):
    ops, key = ra.operations(0.0), jax.random.key(0)
    np.testing.assert_array_equal(run(ops["Solarize"], images, key), 255 - images)
    assert not run(ops["Posterize"], images, key).any()
    assert difference(run(ops["Brightness"], images, key), images // 10) <= 1
    for name in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout", "SolarizeAdd"):
        np.testing.assert_array_equal(run(ops[name], images, key), images, err_msg=name)


@pytest.mark.parametrize(
    "magnitude, bits, threshold, addition", [(5, 2, 128, 55), (10, 4, 256, 110), (15, 6, 384, 165)]
)
def test_levels_grow_with_magnitude_as_in_the_tensorflow_implementation(
    images, magnitude, bits, threshold, addition
):
    ops, key = ra.operations(magnitude), jax.random.key(0)
    np.testing.assert_array_equal(
        run(ops["Posterize"], images, key), images & (256 - (1 << 8 - bits))
    )
    np.testing.assert_array_equal(
        run(ops["Solarize"], images, key), np.where(images < threshold, images, 255 - images)
    )
    expected = np.where(images < 128, np.minimum(images.astype(int) + addition, 255), images)
    np.testing.assert_array_equal(run(ops["SolarizeAdd"], images, key), expected)
    assert_blend(
        run(ops["Brightness"], images, key), 0.0, images.astype(np.float64), 0.18 * magnitude + 0.1
    )


def test_magnitude_20_and_beyond_leaves_posterize_and_solarize_without_effect(images):
    for magnitude in (20, 27):
        for name in ("Posterize", "Solarize"):
            np.testing.assert_array_equal(
                run(ra.operations(magnitude)[name], images, jax.random.key(0)), images
            )


def test_at_224_pixels_magnitude_10_translates_by_100_pixels_either_way_and_cuts_out_80():
    columns = np.broadcast_to(np.arange(224, dtype=np.uint8)[:, None], (16, 224, 224, 3))
    ops = ra.operations(10)
    moved = run(ops["TranslateX"], columns, jax.random.key(0))[:, 0, :, 0]
    left, right = np.full(224, 128), np.full(224, 128)
    left[:124], right[100:] = np.arange(100, 224), np.arange(124)
    went_left, went_right = (moved == left).all(1), (moved == right).all(1)
    assert (went_left ^ went_right).all() and went_left.any() and went_right.any()

    cut = (run(ops["Cutout"], np.zeros_like(columns), jax.random.key(0)) == 128).all(-1)
    for axis in (1, 2):
        sides = cut.any(3 - axis).sum(1)
        assert sides.max() == 80 and sides.min() >= 40


def test_rotate_and_shear_turn_either_way_by_30_degrees_and_a_slope_of_3_tenths(images):
    same = np.repeat(images[:1], 16, axis=0)
    for name, function, amount in (
        ("Rotate", ra.rotate, 30),
        ("ShearX", ra.shear_x, 0.3),
        ("ShearY", ra.shear_y, 0.3),
    ):
        actual = run(ra.operations(10)[name], same, jax.random.key(1))
        one, other = (run(function, images[:1], np.float32([sign * amount])) for sign in (1, -1))
        is_one, is_other = (actual == one).all((1, 2, 3)), (actual == other).all((1, 2, 3))
        assert (is_one ^ is_other).all() and is_one.any() and is_other.any(), name


def test_every_layer_deals_each_operation_to_one_of_sixteen_interleaved_groups(images):
    batch = np.concatenate([images[:4]] * 8)
    key = jax.random.key(3)
    actual = np.asarray(jax.jit(lambda i, k: ra.randaugment(i, k, 1, 9.0))(batch, key))
    groups_of = {}
    for name, operation in ra.operations(9.0).items():
        if name not in ("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY", "Cutout"):
            equal = (actual == run(operation, batch, key)).all((1, 2, 3))
            groups_of[name] = [g for g in range(16) if equal[g] and equal[g + 16]]
    assert all(len(groups) == 1 for groups in groups_of.values()), groups_of
    assert len({groups[0] for groups in groups_of.values()}) == 10


def test_draws_are_uniform_for_an_image_and_independent_between_layers(monkeypatch):
    """With operations that write down their index, two layers leave 16 · first + second in every
    pixel.
    """
    note = {str(i): (lambda images, key, i=i: images * 16 + jnp.uint8(i)) for i in range(16)}
    monkeypatch.setattr(ra, "operations", lambda magnitude, layout=None: note)
    blank = jnp.zeros((32, 1, 1, 3), jnp.uint8)
    keys = jax.random.split(jax.random.key(0), 4096)
    notes = np.asarray(jax.jit(jax.vmap(lambda k: ra.randaugment(blank, k, 2, 9.0)))(keys))[
        :, :, 0, 0, 0
    ]
    for operation in (notes // 16, notes % 16):
        np.testing.assert_array_equal(operation[:, :16], operation[:, 16:])
        np.testing.assert_array_equal(
            np.sort(operation[:, :16]), np.broadcast_to(np.arange(16), (4096, 16))
        )
    assert scipy.stats.chisquare(np.bincount(notes[:, 5], minlength=256)).pvalue > 0.001


@pytest.mark.parametrize("batch", [1, 3, 10, 24])
def test_any_batch_size_works(images, batch):
    images = np.resize(images, (batch, 8, 8, 3))
    out = jax.eval_shape(lambda i, k: ra.randaugment(i, k, 2, 10.0), images, jax.random.key(0))
    assert out.shape == (batch, 8, 8, 3) and out.dtype == jnp.uint8


def test_a_sharded_batch_gives_the_same_images_and_moves_none_between_devices():
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("data",)), PartitionSpec("data"))
    batch = np.random.default_rng(0).integers(0, 256, (128, 12, 12, 3), np.uint8)
    key = jax.random.key(0)
    function = jax.jit(lambda i, k: ra.randaugment(i, k, 1, 10.0))
    sharded = jax.device_put(batch, sharding)
    compiled = function.lower(sharded, key).compile()
    out = compiled(sharded, key)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(function(batch, key)))
    assert out.sharding.is_equivalent_to(sharding, out.ndim)
    for collective in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert collective not in compiled.as_text()
