"""Every augmentation of the package × every layout of pixels: the same change, or refused by its name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.data.test_patch_augmentation import images_of, padded
from vit_jax.base.errors import ConfigError
from vit_jax.data.augmentation import color, patches, pipeline
from vit_jax.data.options import Augment

AUGMENTATIONS = (*pipeline.ON_PIXELS, *pipeline.ON_NORMALIZED)
# The fields that switch an augmentation on, strong enough that at least one image of the batch changes.
STRENGTHS = {
    "flip": {"flip": True},
    "randaugment_layers": {"randaugment_layers": 2, "randaugment_magnitude": 10},
    "autoaugment": {"autoaugment": True},
    "three_augment": {"three_augment": True},
    "color_jitter": {"color_jitter": 0.5},
    "jitter": {"jitter": (0.4, 0.4, 0.2, 0.1), "jitter_probability": 1.0},
    "grey": {"grey": 0.5},
    "blur": {"blur": 0.9},
    "solarize": {"solarize": 0.5},
    "erasing": {"erasing": 0.9, "erasing_mode": "const"},
    "mixup": {"mixup": 0.8},
    "cutmix": {"cutmix": 1.0},
}
POLICIES = ("randaugment_layers", "autoaugment")
NOTHING = dataclasses.replace(Augment(), flip=False)
KEY = jax.random.key(3)
PLAIN = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}


def test_every_switch_of_the_pipeline_is_crossed():
    switches = {field for augmentation in AUGMENTATIONS for field in augmentation.fields}
    assert switches - {"own"} == STRENGTHS.keys()  # `own`: tests/test_extending.py


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).integers(0, 256, (8, 12, 16, 3), np.uint8)


@pytest.mark.parametrize(
    "field",
    [  # The two policies compile for seconds; test_patch_augmentation.py has their operations.
        pytest.param(field, marks=pytest.mark.slow if field in POLICIES else ())
        for field in STRENGTHS
    ],
)
def test_patches_change_as_whole_images_do_or_are_refused(field, images):
    config = dataclasses.replace(NOTHING, **STRENGTHS[field])
    needs_whole = field == "three_augment" or field == "blur"
    if needs_whole:
        with pytest.raises(ConfigError, match=f"config.augment.{field} = .* whole images alone"):
            pipeline.check_native_sizes(config, "config.data.native_tokens = 64")
        return
    pipeline.check_native_sizes(config, "config.data.native_tokens = 64")

    @jax.jit
    def augmented(whole, native):
        whole, _ = pipeline.augment(whole, {}, KEY, config, **PLAIN)
        native, _ = pipeline.augment(native, {}, KEY, config, layout=patches.Patches(3), **PLAIN)
        return whole, native

    whole, native = augmented(images, padded(images))
    native = np.stack(images_of(native))
    assert (np.asarray(whole) != images).any(axis=(1, 2, 3)).sum() >= 2
    if field in ("mixup", "cutmix"):  # Partners are other images there, by aspect.
        assert (native != images).any(axis=(1, 2, 3)).sum() >= 2
        return
    np.testing.assert_allclose(native, whole, atol=1e-3 if "jitter" in field else 0)


@pytest.mark.parametrize("field", STRENGTHS)
def test_masks_move_as_pixels_do_or_are_refused(field, images):
    """A mask of an image whose pixels are its classes."""
    config = dataclasses.replace(NOTHING, **STRENGTHS[field])
    if field in POLICIES:
        with pytest.raises(ConfigError, match=f"config.augment.{field} = .* not of their masks"):
            pipeline.check_masks(config)
        return
    pipeline.check_masks(config)
    masks = jnp.asarray(images[..., 0])
    if field == "flip":
        as_images = jnp.repeat(masks[..., None], 3, axis=-1)
        moved, _ = pipeline.augment(as_images, {}, KEY, config, **PLAIN)
        assert (np.asarray(moved) != as_images).any()
        np.testing.assert_array_equal(pipeline.move(masks, KEY, config), np.rint(moved[..., 0]))
    else:
        np.testing.assert_array_equal(pipeline.move(masks, KEY, config), masks)


@pytest.mark.parametrize("field", STRENGTHS)
def test_images_of_other_channels_are_augmented_or_refused(field, images):
    config = dataclasses.replace(NOTHING, **STRENGTHS[field])
    of_colors = field in (*color.FIELDS, *POLICIES, "three_augment")
    if of_colors:
        with pytest.raises(ConfigError, match=f"config.augment.{field} .* RGB images"):
            pipeline.check_augmentation(config, 1)
        return
    pipeline.check_augmentation(config, 1)
    grey = images[..., :1]
    changed, _ = pipeline.augment(grey, {}, KEY, config, mean=(0.0,), std=(1 / 255,))
    assert (np.asarray(changed) != grey).any()
