"""Which images a teacher labels, how they are mixed with labelled ones, and digits with few labels."""

import pickle

import numpy as np
import pytest

from vit_jax.base.errors import UserError
from vit_jax.data import batches, sources
from vit_jax.data.options import Data
from vit_jax.data.sources.pseudo import PseudoLabelled, select_confident
from vit_jax.recipes.user_files import load_config

# Of two classes; the teacher is sure of the first, the third and, less so, the fourth and fifth.
SAID = np.array([[0.9, 0.1], [0.5, 0.5], [0.2, 0.8], [0.7, 0.3], [0.75, 0.25]], np.float32)


def test_the_images_that_the_teacher_is_sure_of_are_kept():
    given = select_confident(SAID, 0.6, 0)
    np.testing.assert_array_equal(given.images, [0, 2, 3, 4])
    np.testing.assert_array_equal(np.sort(given.order), range(4))
    np.testing.assert_allclose(given.probabilities, SAID[[0, 2, 3, 4]], atol=1e-3)
    with pytest.raises(
        UserError, match="sure of none of 5 images: its most confident answer is 0.900"
    ):
        select_confident(SAID, 0.95, 0)


def test_every_class_has_its_most_confident_images_or_the_same_ones_over_and_over():
    given = select_confident(SAID, 0.6, 2)
    assert sorted(given.images[given.order]) == [0, 2, 2, 4]
    given = select_confident(SAID, 0.6, 4)
    counts = np.bincount(given.images[given.order], minlength=5)
    np.testing.assert_array_equal(counts, [2, 0, 4, 1, 1])  # the most confident of them once more
    # A class of which there is no image stays without.
    assert set(select_confident(SAID, 0.85, 2).images) == {0}


@pytest.fixture(scope="module")
def digits():
    open_split = lambda split: sources.open_source(Data(name="digits_few"), split)  # noqa: E731
    return open_split("few_3"), open_split("rest_3")


def test_few_digits_are_ten_of_every_class_and_the_rest_are_all_others(digits):
    few, rest = digits
    train = sources.open_source(Data(name="digits_few"), "train")
    np.testing.assert_array_equal(np.bincount(few.labels), [10] * 10)
    np.testing.assert_array_equal(np.sort(np.concatenate([few.ids, rest.ids])), train.ids)
    assert set(few.ids) != set(sources.open_source(Data(name="digits_few"), "few_4").ids)


@pytest.mark.parametrize("soft", [True, False])
def test_an_epoch_has_labelled_images_and_a_share_that_the_teacher_labels(digits, soft):
    few, rest = digits
    said = np.random.default_rng(0).dirichlet(np.full(10, 0.3), len(rest)).astype(np.float32)
    given = select_confident(said, 0.3, 20)
    mixed = pickle.loads(pickle.dumps(PseudoLabelled(few, rest, given, ratio=4.0, soft=soft)))
    assert len(mixed) == 500  # all 100 labelled ones, and 400 of 200
    assert mixed[3].name == few[3].name and mixed[299].name == mixed[499].name  # 200 later
    row = given.order[7]
    record = mixed[107]
    assert record.name == rest[int(given.images[row])].name
    if soft:
        np.testing.assert_allclose(record.label, said[given.images[row]], atol=1e-3)
        assert record.label.sum() == pytest.approx(1) and mixed[3].label[few[3].label] == 1
    else:
        assert record.label == said[given.images[row]].argmax() and mixed[3].label == few[3].label
    other = PseudoLabelled(few, rest, select_confident(said[::-1], 0.3, 20), ratio=4.0, soft=soft)
    assert other.fingerprint() != mixed.fingerprint()


def test_a_batch_has_the_teachers_probabilities(digits):
    few, rest = digits
    said = np.random.default_rng(0).dirichlet(np.ones(10), len(rest)).astype(np.float32)
    mixed = PseudoLabelled(few, rest, select_confident(said, 0.0, 0), ratio=1.0, soft=True)
    config = load_config("configs/digits.py")
    config.pseudo.teacher = "T"
    spec = batches.spec(config, num_classes=10)
    made = batches.TrainBatches(mixed, config, range(config.batch_size))
    batch = made.empty()
    made.fill(batch, 0, slice(None))
    assert {n: (x.shape, x.dtype) for n, x in batch.items()} == {
        n: (x.shape, x.dtype) for n, x in spec.items()
    }
    np.testing.assert_allclose(batch["label"].sum(1), 1, atol=1e-5)
    assert 0 < (batch["label"].max(1) == 1).sum() < config.batch_size
