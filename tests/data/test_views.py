"""Several views of one image: on the host, and augmented on devices."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.data.test_loader import Numbers
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import batches, views

GLOBAL, LOCAL = (
    {"crop_area": (0.3, 1.0), "blur": 1.0},
    {
        "count": 3,
        "image_size": 8,
        "crop_area": (0.05, 0.3),
    },
)


def make_config(*said, **changes):
    config = default_config()
    config.data.image_size, config.batch_size = 16, 8
    config.data.views = said
    config.update_from_flattened_dict(changes)
    return schema.typed(config_class(), config)


class Pictures(Numbers):
    """Images of noise."""

    def __getitem__(self, index):
        noise = np.random.default_rng(index).integers(0, 256, (20, 24, 3), np.uint8)
        return dataclasses.replace(super().__getitem__(index), image=noise)


def filled(config, rows, step=3):
    host = batches.TrainBatches(Pictures(40), config, rows)
    batch = host.empty()
    host.fill(batch, step, slice(None))
    return batch


def test_a_batch_has_the_views_that_are_described_in_any_number_of_processes():
    config = make_config(GLOBAL, GLOBAL | {"solarize": 0.2}, LOCAL)
    whole = filled(config, range(8))
    spec = batches.spec(config, num_classes=40)
    assert {n: (x.shape, x.dtype) for n, x in whole.items()} == {
        n: (x.shape, x.dtype) for n, x in spec.items()
    }
    assert spec["image_2"].shape == (8, 3, 8, 8, 3)
    parts = [filled(config, rows) for rows in (range(3), range(3, 8))]
    for name, array in whole.items():
        np.testing.assert_array_equal(array, np.concatenate([part[name] for part in parts]))
    # No two views are cut alike.
    assert (whole["image_0"] != whole["image_1"]).any((1, 2, 3, 4)).all()
    assert (whole["image_2"][:, 0] != whole["image_2"][:, 1]).any((1, 2, 3)).all()


def test_a_view_more_changes_nothing_of_the_others():
    few, many = make_config(GLOBAL, LOCAL), make_config(GLOBAL, LOCAL | {"count": 5}, GLOBAL)
    a, b = filled(few, range(8)), filled(many, range(8))
    np.testing.assert_array_equal(a["image_0"], b["image_0"])
    np.testing.assert_array_equal(a["image_1"], b["image_1"][:, :3])
    one = make_config(**{"data.crop_area": (0.3, 1.0)})
    np.testing.assert_array_equal(filled(one, range(8))["image"], a["image_0"][:, 0])

    def augmented(config, batch):
        made = jax.jit(
            lambda batch: views.augment_views(
                batch, views.of(config), jax.random.key(1), mean=(0.5,) * 3, std=(0.5,) * 3
            )
        )
        return made({name: x for name, x in batch.items() if name != "label"})

    a, b = augmented(few, a), augmented(many, b)
    np.testing.assert_array_equal(a["image_0"], b["image_0"])
    np.testing.assert_array_equal(a["image_1"], b["image_1"][:, :3])


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"crop_size": 3}, "view 1 has no option 'crop_size'; did you mean 'crop_"),
        ({"mixup": 0.2}, "view 1 has no option 'mixup'"),
        ({"count": 0}, "view 1: count = 0 must be at least 1"),
        ({"crop_area": (0.5, 0.1)}, "view 1: config.data.crop_area = .* must rise"),
        ("local", "view 1, 'local', is no {'OPTION': VALUE"),
    ],
)
def test_views_that_cannot_be_are_refused(said, message):
    with pytest.raises(ConfigError, match=message):
        views.of(make_config(GLOBAL, said))
