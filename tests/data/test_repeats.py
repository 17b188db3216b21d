"""Repeated augmentation: the order of examples that come several times in a batch."""

import numpy as np
import pytest

from vit_jax.config import default_config
from vit_jax.data.batches import TrainBatches
from vit_jax.data.order import batch_indices
from vit_jax.data.record import Record


@pytest.mark.parametrize("batch_size, repeats", [(48, 3), (1024, 3), (64, 2), (128, 4), (16, 1)])
def test_with_repeats_every_example_comes_so_often_and_a_batch_holds_its_copies(
    batch_size, repeats
):
    """Over batches that end together with an example."""
    size, count = 5000, repeats * 2
    batches = [batch_indices(7, step, batch_size, size, repeats) for step in range(count)]
    ids, seen = np.unique(np.concatenate(batches), return_counts=True)
    assert len(ids) == count * batch_size // repeats <= size and (seen == repeats).all()
    # The examples are those of batches without repeats, in their order.
    expected = batch_indices(7, 0, count * batch_size // repeats, size)
    np.testing.assert_array_equal(np.sort(ids), np.sort(expected))
    for batch in batches:
        copies = [np.flatnonzero(batch == i) for i in np.unique(batch)]
        whole = [rows for rows in copies if len(rows) == repeats]
        assert len(whole) >= batch_size // repeats - 1
        for rows in whole:
            # Not next to each other, where mixup would mix them; not in one group of RandAugment.
            gaps = np.diff(np.append(rows, rows[0] + batch_size))
            assert repeats == 1 or gaps.min() > 1
            assert len(np.unique(rows % 16)) == repeats


class Noise:
    """60 images of noise; label i for image i."""

    multi_label, classes = False, tuple(map(str, range(60)))

    def __len__(self):
        return 60

    def __getitem__(self, index):
        pixels = np.random.default_rng(int(index)).integers(0, 256, (9, 11, 3), np.uint8)
        return Record(pixels, index, f"noise {index}")


def test_copies_are_cut_differently_whoever_builds_them():
    config = default_config()
    config.batch_size = 16
    config.data.update({"repeats": 2, "train_crop": "inception", "image_size": 8})
    whole, half = (
        TrainBatches(Noise(), config, range(16)),
        TrainBatches(Noise(), config, range(8, 16)),
    )
    for step in (0, 5, 1_000_000):
        batch, part = whole.empty(), half.empty()
        assert not whole.fill(batch, step, slice(None)) and not half.fill(part, step, slice(None))
        for name in batch:
            np.testing.assert_array_equal(batch[name][8:], part[name])
        ids = batch_indices(config.seed, step, 16, 60, repeats=2)
        np.testing.assert_array_equal(batch["label"], ids)
        for label in np.unique(ids):
            first, second = batch["image"][ids == label][:2]
            assert (first != second).any()
