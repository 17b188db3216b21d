import collections
import pickle

import cv2
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.order import example_ids
from vit_jax.data.sources.mixture import epoch_counts


def write_folder(root, **classes):
    """root/CLASS/N.png, as many as said."""
    for name, count in classes.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            cv2.imwrite(str(root / name / f"{i}.png"), np.full((2, 2, 3), i, np.uint8))
    return str(root)


def config(*entries, **fields):
    return Data(name="mixture", mixture=entries, holdout=0.0, **fields)


def test_an_epoch_has_the_shares_and_sees_every_example_evenly(tmp_path):
    birds = write_folder(tmp_path / "birds", emu=20, owl=40)
    pets = write_folder(tmp_path / "pets", cat=4, owl=3)
    source = sources.open_train(config((birds, 3), (pets, 1)))
    assert len(source) == 80 and source.classes == ("emu", "owl", "cat")
    seen = collections.Counter(source[index].name for index in range(len(source)))
    from_birds = [count for name, count in seen.items() if name.startswith(birds)]
    from_pets = [count for name, count in seen.items() if name.startswith(pets)]
    assert from_birds == [1] * 60
    assert sum(from_pets) == 20 and set(from_pets) == {2, 3} and len(from_pets) == 7
    owls = {source[i].label for i in range(80) if "/owl/" in source[i].name}
    assert owls == {1}  # joined by name


def test_shares_hold_on_the_way_through_an_epoch_too(tmp_path):
    birds = write_folder(tmp_path / "birds", emu=20, owl=40)
    pets = write_folder(tmp_path / "pets", cat=4, dog=3)
    source = sources.open_train(config((birds, 1), (pets, 1)))
    order = example_ids(0, np.arange(len(source)), len(source))
    first = [source[int(index)].name.startswith(birds) for index in order[:60]]
    assert len(source) == 120 and abs(np.mean(first) - 0.5) < 0.2
    again = pickle.loads(pickle.dumps(source))
    assert all(again[int(index)] == source[int(index)] for index in order[:5])
    assert source.read(order[:9].tolist()) == [source[int(index)] for index in order[:9]]


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [
        ([1000, 50], [3, 1], [1000, 333]),
        ([10, 10], [1, 1], [10, 10]),
        ([100, 10], [1, 9], [100, 900]),
        ([300_000_000, 1_281_167], [0.9, 0.1], [300_000_000, 33_333_333]),
    ],
)
def test_the_least_oversampled_set_is_seen_once(sizes, weights, counts):
    assert epoch_counts(sizes, weights) == counts


def test_evaluation_sees_every_example_of_every_set_once(tmp_path):
    birds = write_folder(tmp_path / "birds", emu=5, owl=4)
    pets = write_folder(tmp_path / "pets", cat=4, owl=3)
    source = sources.open_eval(config((birds, 3), (pets, 1), eval_split="train"))
    names = [source[index].name for index in range(len(source))]
    assert len(names) == len(set(names)) == 16


def test_sets_are_named_or_found_by_place(tmp_path):
    birds = write_folder(tmp_path / "birds", emu=5, owl=4)
    source = sources.open_train(config(("digits", 1), (birds, 1)))
    assert source.classes == (*"0123456789", "emu", "owl")


def test_wrong_mixtures_are_refused(tmp_path):
    for entries, words in (
        ((), "config.data.mixture is empty"),
        ((("digits", 0),), "('digits', 0) is not (NAME or PATH, WEIGHT)"),
        (("digits",), "'digits' is not (NAME or PATH, WEIGHT)"),
        ((("digitz", 1),), "did you mean 'digits'?"),
    ):
        with pytest.raises(ConfigError) as raised:
            sources.open_train(config(*entries, path=str(tmp_path)))
        assert words in str(raised.value)
