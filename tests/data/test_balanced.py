"""Balanced sampling: every class equally often in an epoch, every example of a class over epochs."""

import jax
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import sources
from vit_jax.data.balanced import Balanced
from vit_jax.data.batches import TrainBatches, order_of
from vit_jax.data.loader import train_batches
from vit_jax.data.options import Data
from vit_jax.data.record import Record
from vit_jax.devices import meshes

COUNTS = (700, 200, 90, 9, 1)  # of a class each, 1,000 in all


class Uneven:
    """1,000 examples of five classes, in a random order; a class in between has none."""

    classes, multi_label = tuple("abxcde"), False
    labels = np.random.default_rng(0).permutation(np.repeat([0, 1, 3, 4, 5], COUNTS))

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        pixels = np.full((4, 4, 3), index % 256, np.uint8)
        return Record(pixels, int(self.labels[index]), f"example {index}")


def test_every_class_comes_equally_often_in_an_epoch_wherever_one_looks():
    order, labels = order_of(Uneven(), 3, "balanced"), Uneven.labels
    for epoch in (0, 1, 1_000_000):
        seen = labels[order(epoch * 1000 + np.arange(1000))]
        assert np.bincount(seen).tolist() == [200, 200, 0, 200, 200, 200]
        # The epoch's permutation mixes them: a tenth of it has 20 of each, give or take.
        assert np.abs(np.bincount(seen[:100])[[0, 1, 3, 4, 5]] - 20).max() < 20


def test_classes_that_do_not_divide_the_epoch_differ_by_one():
    labels = np.asarray([0] * 5 + [1] * 3 + [2] * 3)
    seen = labels[Balanced(0, labels)(np.arange(11))]
    assert sorted(np.bincount(seen).tolist()) == [3, 4, 4]


def test_over_epochs_every_example_of_a_class_comes_equally_often():
    order, labels = order_of(Uneven(), 0, "balanced"), Uneven.labels
    seen = np.bincount(order(np.arange(7 * 1000)), minlength=1000)
    for label in (0, 1, 3, 4, 5):
        of_class = seen[labels == label]
        assert of_class.sum() == 7 * 200 and np.ptp(of_class) <= 1
    # Within an epoch too: 200 of 700 at most once, 200 of 9 each 22 or 23 times.
    seen = np.bincount(order(np.arange(1000)), minlength=1000)
    assert seen[labels == 0].max() == 1 and set(seen[labels == 4]) == {22, 23}


def test_the_seed_decides_which_and_in_which_order():
    first, again, other = (order_of(Uneven(), s, "balanced")(np.arange(1000)) for s in (0, 0, 1))
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    of_first, of_other = (set(ids[Uneven.labels[ids] == 0]) for ids in (first, other))
    assert len(of_first & of_other) < 100  # other 200 of the 700


def test_positions_may_be_asked_for_in_any_order_and_number():
    order = order_of(Uneven(), 0, "balanced")
    positions = np.random.default_rng(0).integers(0, 5000, 64)
    whole = order(np.arange(5000))
    assert np.array_equal(order(positions), whole[positions])
    assert all(order(np.asarray([p]))[0] == whole[p] for p in positions[:5])


def test_a_batch_is_a_function_of_seed_and_step_not_of_devices_or_hosts():
    config = default_config()
    config.batch_size = 16
    config.data.update({"image_size": 4, "train_crop": "resize", "sampling": "balanced"})
    expected = order_of(Uneven(), config.seed, "balanced")(np.arange(80, 96))
    for devices in (1, 8):
        mesh = meshes.make_mesh({"data": devices, "fsdp": 1, "tensor": 1}, jax.devices()[:devices])
        with train_batches(
            Uneven(), config, meshes.batch_sharding(mesh), start_step=5, stop_step=6
        ) as batches:
            batch = next(batches)
        assert np.array_equal(batch["label"], Uneven.labels[expected])
        assert np.array_equal(batch["image"][:, 0, 0, 0], expected % 256)
    half = TrainBatches(Uneven(), config, range(8, 16))
    part = half.empty()
    half.fill(part, 5, slice(None))
    assert np.array_equal(part["label"], Uneven.labels[expected[8:]])


def test_uniform_sampling_is_what_it_was():
    """The order of the first version, so that its runs go on."""
    order = order_of(Uneven(), 7, "uniform")
    positions = np.asarray([0, 1, 2, 999, 1000, 123_456])
    assert order(positions).tolist() == [573, 636, 849, 230, 740, 636]


def test_what_cannot_be_balanced_is_refused_and_why(tmp_path):
    (tmp_path / "a.csv").write_text("path\n1.png\n2.png\n")
    (tmp_path / "b.csv").write_text("path,labels\n1.png,a;b\n2.png,a\n")
    for fields, why in (
        ({"name": "folder", "path": f"{tmp_path}/a.csv"}, "these have no labels"),
        ({"name": "folder", "path": f"{tmp_path}/b.csv"}, "these have several each"),
        ({"name": "mixture", "mixture": (("digits", 1),)}, "weight its sets instead"),
    ):
        config = Data(**fields, holdout=0.0, sampling="balanced")
        with pytest.raises(ConfigError, match=why):
            sources.open_train(config)
        assert sources.open_eval(Data(**fields, holdout=0.0, eval_split="train"))


def test_digits_may_be_balanced():
    source = sources.open_train(Data(sampling="balanced"))
    seen = source.labels[order_of(source, 0, "balanced")(np.arange(len(source)))]
    assert np.ptp(np.bincount(seen)) <= 1
