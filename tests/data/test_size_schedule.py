"""A schedule of image sizes, on the host: which step has which size, and what its images show."""

import numpy as np
import pytest

from tests.data.test_views import Pictures, make_config
from vit_jax.base.errors import ConfigError
from vit_jax.data import batches, size_schedule, views

SCHEDULE = {"data.size_schedule": ((0, 8), (0.4, "12x12"), (0.75, 16)), "duration": "20 steps"}


def filled(config, step, rows=range(8)):
    host = batches.TrainBatches(Pictures(40), config, rows)
    batch = host.empty(step)
    host.fill(batch, step, slice(None))
    return batch["image"]


def test_the_size_of_images_follows_from_the_step_alone():
    config = make_config(**SCHEDULE)
    choose = views.make_choice(config, 40)
    variants = views.variants(config)
    sizes = [variants[choose(step)].data.image_size for step in range(20)]
    assert sizes == 8 * [8] + 7 * [12] + 5 * [16]
    specs = batches.specs(config, num_classes=40)
    assert [x["image"].shape for x in specs] == [(8, n, n, 3) for n in (8, 12, 16)]
    assert batches.spec(config, num_classes=40)["image"].shape == (8, 16, 16, 3)
    for step in (7, 8, 15):
        whole = filled(config, step)
        assert whole.shape == (8, sizes[step], sizes[step], 3)
        parts = [filled(config, step, rows) for rows in (range(3), range(3, 8))]
        np.testing.assert_array_equal(whole, np.concatenate(parts))


@pytest.mark.parametrize("crop", ["inception", "random", "pad", "resize"])
def test_small_images_show_what_large_ones_would(crop):
    changes = {"data.train_crop": crop, "data.resize": 20, "data.eval_resize": 20, "data.pad": 4}
    large = filled(make_config(**changes | {"data.crop_area": (0.9, 1.0)}), 3)
    scheduled = {"data.size_schedule": ((0, 8), (0.5, 16)), "data.crop_area": (0.9, 1.0)}
    small = filled(make_config(**changes | scheduled | {"duration": "20 steps"}), 3)
    halved = large.reshape(8, 8, 2, 8, 2, 3).mean((2, 4))
    # Rounded to other pixels, and resized by another factor of an image of noise.
    assert np.corrcoef(halved.ravel(), small.ravel())[0, 1] > (0.5 if crop == "random" else 0.8)


def test_pixels_of_crops_grow_with_the_size():
    config = make_config(**SCHEDULE | {"data.resize": 32, "data.pad": 4})
    data = [phase.data for phase in size_schedule.phases(config.data)]
    assert [(d.resize, d.pad) for d in data] == [(16, 2), (24, 3), (32, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data.size_schedule": ((0, 8), (0.5, 12))}, "ends with images of 12 .*image_size = 16"),
        ({"data.size_schedule": ((0.1, 8), (0.5, 16))}, r"shares \[0.1, 0.5\] .* first must be 0"),
        ({"data.size_schedule": ((0, 8), (0.5, 12), (0.5, 16))}, "each larger than the previous"),
        ({"data.size_schedule": ((0, 8), (1.0, 16))}, "below 1"),
        ({"data.size_schedule": (128, 224)}, "128 is no .share of the run, image size."),
        ({"data.size_schedule": ((0, "8y"), (0.5, 16))}, "the size after 0 = '8y' is no image size"),
        ({"data.size_schedule": ((0, 8), (0.5, 16)), "data.permute": "all pixels"}, "permutes images"),
        ({"data.size_schedule": ((0, 18), (0.5, 16)), "data.train_crop": "random", "data.resize": 15}, "of 18"),
    ],
)  # fmt: skip
def test_what_no_schedule_can_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        views.variants(make_config(**changes))


def test_views_have_sizes_by_step_of_their_own():
    with pytest.raises(ConfigError, match="config.data.view_sizes sets the sizes"):
        views.variants(make_config({"count": 2}, **SCHEDULE))
