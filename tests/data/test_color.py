"""DINO's changes of colours against Pillow, and the standard library's HSV in float64."""

import colorsys
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps

from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import color
from vit_jax.data.augmentation.pipeline import check_augmentation
from vit_jax.data.options import Augment


def batch(size=64, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (size, 6, 5, 3), np.uint8)


def exactly(image, light, contrast, saturation, hue):
    """`color.jitter` of one image in float64."""
    weights = np.array([0.2989, 0.587, 0.114])
    x = np.clip(image.astype(np.float64) * light, 0, 255)
    for grey, factor in (
        (lambda x: (x @ weights).mean(), contrast),
        (lambda x: (x @ weights)[..., None], saturation),
    ):
        x = np.clip(grey(x) + factor * (x - grey(x)), 0, 255)

    def turn(rgb):
        h, s, v = colorsys.rgb_to_hsv(*rgb / 255)
        return np.array(colorsys.hsv_to_rgb((h + hue) % 1, s, v)) * 255

    return np.apply_along_axis(turn, -1, x)


def test_jitter_equals_float64_formulas():
    images = batch(16)
    images[0], images[1, 0] = 128, 255  # grey: no hue to turn
    random = np.random.default_rng(1)
    factors = np.concatenate(
        [random.uniform(0.5, 1.5, (3, 16)), random.uniform(-0.5, 0.5, (1, 16))]
    )
    jittered = jax.jit(color.jitter)(
        images, jnp.asarray(factors[..., None, None, None], jnp.float32)
    )
    for image, own, one in zip(images, factors.T, jittered, strict=True):
        np.testing.assert_allclose(one, exactly(image, *own), atol=2e-3)


def test_each_change_is_made_of_its_share_of_the_images_and_nothing_of_others():
    images = batch(512)
    key, none = jax.random.key(0), Augment()
    assert color.change_colors(images, key, none) is images
    changed = jax.jit(color.change_colors, static_argnums=2)
    as_pillow = {
        "grey": lambda x: np.asarray(ImageOps.grayscale(x).convert("RGB")),
        "solarize": lambda x: np.asarray(ImageOps.solarize(x)),
    }
    for name, share in (("grey", 0.2), ("solarize", 0.2), ("blur", 0.5), ("jitter", 0.8)):
        value = (0.4, 0.4, 0.2, 0.1) if name == "jitter" else share
        found = np.asarray(changed(images, key, dataclasses.replace(none, **{name: value})))
        differs = (found != images).any((1, 2, 3))
        # The narrowest blurs change nothing.
        assert share - (0.1 if name == "blur" else 0.07) < differs.mean() < share + 0.07, name
        if name in as_pillow:
            for i in np.flatnonzero(differs):
                expected = as_pillow[name](Image.fromarray(images[i]))
                np.testing.assert_array_equal(found[i], expected)


def test_a_blurred_image_is_near_pillows():
    gradient = np.add.outer(np.arange(24) * 5, np.arange(24) * 5)
    image = np.stack([gradient, gradient[::-1], gradient.T], -1).astype(np.uint8)
    images = np.broadcast_to(image, (64, 24, 24, 3))
    found = color.change_colors(images, jax.random.key(0), Augment(blur=1.0))
    number = list(color.CHANGES).index("blur")
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), 1), number)
    key = jax.random.split(key)[1]
    sigma = color.blur_sigma(key, 64)
    for i in range(0, 64, 16):
        expected = np.asarray(
            Image.fromarray(image).filter(ImageFilter.GaussianBlur(float(sigma[i])))
        )
        difference = np.abs(np.asarray(found[i], int)[6:-6, 6:-6] - expected[6:-6, 6:-6])
        assert difference.max() <= 3


def test_every_change_is_an_option_and_only_of_colours():
    """As `CHANGES` says: a line there is asked for by its field, and refused of images without colours."""
    for field, change in color.CHANGES.items():
        off, on = Augment(), Augment(**{field: (0.1, 0.1, 0.1, 0.1) if field == "jitter" else 0.5})
        assert not getattr(off, field) and 0 < getattr(on, change.probability) < 1
        check_augmentation(on, channels=3)
        with pytest.raises(ConfigError, match=f"config.augment.{field} changes the colours"):
            check_augmentation(on, channels=1)


def test_colour_jitter_comes_first_and_the_others_see_whole_levels():
    images, key = batch(32), jax.random.key(3)
    both = Augment(color_jitter=0.4, blur=0.5)
    jittered = color.change_colors(images, key, dataclasses.replace(both, blur=0.0))
    assert jittered.dtype == jnp.float32 and (jittered != jnp.round(jittered)).any()
    rounded = jnp.floor(jittered + 0.5).astype(jnp.uint8)
    after = color.change_colors(rounded, key, dataclasses.replace(both, color_jitter=0.0))
    np.testing.assert_array_equal(color.change_colors(images, key, both), after)
