"""3-Augment against Pillow and SciPy."""

import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import PIL.ImageFilter
import PIL.ImageOps
import scipy.ndimage
import scipy.stats

from vit_jax.data.augmentation import color
from vit_jax.data.augmentation import three_augment as three

BATCH = 300


def batch(seed=0):
    return np.random.default_rng(seed).integers(0, 256, (BATCH, 20, 24, 3), np.uint8)


def test_grey_equals_pillow_for_all_colours_of_a_grid():
    steps = np.arange(0, 256, 3, np.uint8)
    colours = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, 86, -1, 3)
    expected = np.asarray(PIL.Image.fromarray(colours[0]).convert("L"))
    np.testing.assert_array_equal(color.grey(colours)[0, ..., 0], expected)


def test_blur_is_the_gaussian_and_near_pillows():
    images, sigma = batch()[:4], np.array([0.1, 0.5, 1.0, 2.0], np.float32)
    actual = jax.jit(color.gaussian_blur)(images, sigma)
    assert actual.dtype == jnp.uint8
    for image, result, s in zip(images, np.asarray(actual, int), sigma, strict=True):
        exact = scipy.ndimage.gaussian_filter(
            image.astype(np.float64), s, mode="nearest", radius=6, axes=(0, 1)
        )
        assert np.abs(result - exact).max() <= 0.5 + 1e-3
        pillow = PIL.Image.fromarray(image).filter(PIL.ImageFilter.GaussianBlur(float(s)))
        # Of noise, the hardest case for Pillow's boxes.
        assert np.abs(result - np.asarray(pillow, int)).mean() < 3


def test_each_image_is_grey_or_solarised_or_blurred_each_as_often():
    images = batch()
    out = np.asarray(jax.jit(three.three_augment)(images, jax.random.key(0)))
    is_grey = (out == np.asarray(color.grey(images))).all((1, 2, 3))
    solarized = np.stack([PIL.ImageOps.solarize(PIL.Image.fromarray(i)) for i in images])
    is_solarized = (out == solarized).all((1, 2, 3))
    assert not (is_grey & is_solarized).any()
    rest = ~(is_grey | is_solarized)
    counts = [is_grey.sum(), is_solarized.sum(), rest.sum()]
    assert scipy.stats.chisquare(counts).pvalue > 0.001
    # What is left was blurred: noise loses contrast, colours stay.
    spread = out[rest].std((1, 2, 3)) / images[rest].std((1, 2, 3))
    assert spread.max() <= 1.001 and spread.min() < 0.3
    assert abs(out[rest].mean() - images[rest].mean()) < 1


def test_the_draws_depend_on_the_key_alone():
    images = batch()
    function = jax.jit(three.three_augment)
    first, again, other = (np.asarray(function(images, jax.random.key(k))) for k in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert (first != other).any((1, 2, 3)).mean() > 0.5
