"""Several views of one image: on the host, and augmented on devices."""

import dataclasses

import jax
import numpy as np
import pytest

from tests.data.test_loader import Numbers
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.data import batches, several_views, views

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
            lambda batch: several_views.augment_views(
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


def test_a_view_has_its_own_training_crop_with_all_that_it_takes():
    jitter = {"train_crop": "jitter", "crop_scale": (0.5, 1.0)}
    assert views.of(make_config(GLOBAL, jitter))[1].data.crop_scale == (0.5, 1.0)


def test_what_is_cut_again_is_the_same_part_with_the_same_flip():
    plain = {"crop_area": (0.3, 0.6), "again": 2.0}
    config = make_config(plain, plain | {"blur": 1.0, "grey": 1.0}, LOCAL)
    batch = filled(config, range(8))
    assert batch["image_0_again"].shape == (8, 1, 32, 32, 3) and "image_2_again" not in batch
    few = filled(make_config(*({**v, "again": 0.0} for v in (plain, plain)), LOCAL), range(8))
    for name, array in few.items():
        np.testing.assert_array_equal(array, batch[name])
    made = jax.jit(
        lambda batch: several_views.augment_views(
            batch, views.of(config), jax.random.key(1), mean=(0.5,) * 3, std=(0.5,) * 3
        )
    )({name: x for name, x in batch.items() if name != "label"})
    for name in ("image_0", "image_1"):
        large = np.asarray(made[f"{name}_again"])
        small = large.reshape(8, 1, 16, 2, 16, 2, 3).mean((3, 5))
        pixels = np.asarray(made["image_0"]) if name == "image_0" else small
        # Two filters of the same part: noise of other parts, or mirrored, is uncorrelated.
        assert np.corrcoef(small.ravel(), pixels.ravel())[0, 1] > 0.9
    grey = np.asarray(made["image_1"])
    np.testing.assert_allclose(grey[..., 0], grey[..., 1], atol=1e-5)
    assert np.abs(large[..., 0] - large[..., 1]).max() > 0.1


def test_sizes_are_drawn_by_seed_and_step_alone():
    entries = (
        {"share": 1.0, "sizes": (16, 8), "start": "10 steps"},
        {"share": 3.0, "sizes": ("24x32", 12), "start": "10 steps"},
    )
    changes = {"data.view_sizes": entries, "duration": "2000 steps"}
    config = make_config(GLOBAL | {"count": 2}, LOCAL, **changes)
    choose = views.make_choice(config, 40)
    chosen = [choose(step) for step in range(2000)]
    assert set(chosen[:10]) == {0} and chosen == [choose(step) for step in range(2000)]
    assert 0.71 < np.mean(np.array(chosen[10:]) == 2) < 0.79
    other = views.make_choice(dataclasses.replace(config, seed=1), 40)
    assert [other(step) for step in range(2000)] != chosen
    step = 10 + chosen[10:].index(2)
    host = batches.TrainBatches(Pictures(40), config, range(8))
    batch = host.empty(step)
    host.fill(batch, step, slice(None))
    assert batch["image_0"].shape == (8, 2, 24, 32, 3) and batch["image_1"].shape == (
        8,
        3,
        12,
        12,
        3,
    )
    specs = batches.specs(config, num_classes=40)
    assert len(specs) == 2  # the first entry has the sizes of the views themselves
    assert {n: x.shape for n, x in batch.items()} == {n: x.shape for n, x in specs[1].items()}
