"""Images permuted for experiments: in training as in evaluation, and all alike."""

import dataclasses

import numpy as np
import pytest

from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data.augmentation import augment, permute


@pytest.mark.parametrize("kind", permute.KINDS)
def test_a_permutation_keeps_every_pixel_and_moves_all_images_alike(kind):
    images = np.arange(2 * 8 * 12 * 3).reshape(2, 8, 12, 3)
    moved = permute.permuted(images, 4, kind)
    assert moved.shape == images.shape and (moved != images).any()
    np.testing.assert_array_equal(np.sort(moved, axis=None), np.sort(images, axis=None))
    np.testing.assert_array_equal(moved[1] - moved[0], np.full((8, 12, 3), 8 * 12 * 3))
    if kind == "patches":
        blocks = moved[0].reshape(2, 4, 3, 4, 3).swapaxes(1, 2).reshape(6, -1)
        assert (np.diff(blocks, axis=1) == np.diff(blocks, axis=1)[0]).all()


def data(**fields):
    typed = schema.typed(config_class(), default_config()).data
    return dataclasses.replace(typed, **fields)


def test_evaluation_sees_images_permuted_as_the_config_says():
    images = np.random.default_rng(0).integers(0, 256, (2, 8, 12, 3)).astype(np.uint8)
    plain = np.asarray(augment.prepared(images, data(), np.float32))
    for kind in permute.KINDS:
        found = augment.prepared(images, data(permute=kind, permute_patch=4), np.float32)
        np.testing.assert_array_equal(found, permute.permuted(plain, 4, kind))


def test_images_that_cannot_be_cut_into_the_permuted_patches_are_refused():
    with pytest.raises(
        ConfigError, match="images of 30 pixels cannot be split .*permute_patch = 16"
    ):
        permute.check_patches(data(permute="both", image_size=30))
    permute.check_patches(data(permute="all pixels", image_size=30))
