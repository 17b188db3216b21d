"""Patch sizes by step, on the host: which step has which, how its batch says so, and what is no list of sizes."""

import numpy as np
import pytest

from tests.data.test_size_schedule import filled
from tests.data.test_views import make_config
from vit_jax.base.errors import ConfigError
from vit_jax.data import batches, patch_sizes, views
from vit_jax.models.contract import size_and_patch

SIZES = {"data.patch_sizes": (8, (2, 2), 4)}  # of images of 16 pixels
PUBLISHED = (48, 40, 30, 24, 20, 16, 15, 12, 10, 8)


def test_the_patch_size_is_drawn_by_seed_and_step_with_its_share():
    config = make_config(**SIZES)
    assert [variant.patch for variant in views.variants(config)] == [2, 4, 8]  # the longest first
    choose, steps = views.make_choice(config, 40), range(1000)
    drawn = [choose(step) for step in steps]
    assert np.allclose(np.bincount(drawn) / 1000, [0.5, 0.25, 0.25], atol=0.06)
    again = views.make_choice(make_config(**SIZES), 97)
    assert drawn[::-1] == [again(step) for step in reversed(steps)]
    other = views.make_choice(make_config(seed=1, **SIZES), 40)
    assert drawn[:100] != [other(step) for step in range(100)]


def test_the_published_sizes_are_as_often_as_each_other():
    config = make_config(**{"data.patch_sizes": PUBLISHED, "data.image_size": 240})
    assert patch_sizes.find_sizes(config.data) == dict.fromkeys(sorted(PUBLISHED), 0.1)
    assert batches.spec(config, num_classes=40)["image"].shape == (8, 30, 8, 30, 8, 3)


def test_a_batch_has_the_same_images_in_any_patch_size_and_number_of_processes():
    config, plain = make_config(**SIZES), make_config()
    specs = [spec["image"].shape for spec in batches.specs(config, num_classes=40)]
    for step in range(6):
        image = filled(config, step)
        assert image.shape in specs and size_and_patch(image.shape)[0] == (16, 16)
        np.testing.assert_array_equal(image.reshape(8, 16, 16, 3), filled(plain, step))
        parts = [filled(config, step, rows) for rows in (range(3), range(3, 8))]
        np.testing.assert_array_equal(image, np.concatenate(parts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.patch_sizes": (8, 1)}, "= 1: .* set 2 or more"),
        ({"data.patch_sizes": (8, 16)}, "= 16 leaves one patch .* 16 pixels"),
        ({"data.patch_sizes": (8, 3)}, "patches of 3; possible are 2, 4, 8$"),
        ({"data.patch_sizes": (8, 4, 8)}, r"names 8 twice: give it a share, \(8, 2\)"),
        ({"data.patch_sizes": ((8, 0), 4)}, "share of 8 is 0"),
        ({"data.patch_sizes": ("8", 4)}, "'8' is no patch size"),
        (SIZES | {"data.size_schedule": ((0, 8), (0.5, 16))}, r"set config.data.size_schedule=\(\)"),
        (SIZES | {"data.native_tokens": 64}, "set config.data.native_tokens=0"),
        (SIZES | {"data.permute": "patches"}, "permutes patches of one size"),
    ],
)  # fmt: skip
def test_what_no_list_of_patch_sizes_can_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        views.variants(make_config(**changes))


def test_views_have_one_patch_size():
    with pytest.raises(ConfigError, match=r"set config.data.views=\(\)"):
        views.variants(make_config({"count": 2}, **SIZES))
