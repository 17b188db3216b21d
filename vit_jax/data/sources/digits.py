"""The 1,797 hand-written digits (8 × 8 pixels, 10 classes) that come with scikit-learn: real, and
no download. Also with few labels: 'digits_few'.
"""

import dataclasses
import functools
import importlib.util
import os
from collections.abc import Callable

import numpy as np

from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record
from vit_jax.data.sources import fingerprint

_TEST_SHARE = 0.2
_FEW = 10  # examples of each class in a small training set
_DRAWS = 10  # small training sets


@dataclasses.dataclass(frozen=True)
class Digits:
    """Some of the digits: `images` (n, 8, 8, 3) uint8, `labels` (n,), `ids` (n,) their numbers in
    scikit-learn.
    """

    images: np.ndarray
    labels: np.ndarray
    ids: np.ndarray
    classes: tuple[str, ...] = tuple("0123456789")
    multi_label: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> Record:
        return Record(self.images[index], int(self.labels[index]), f"digits/{self.ids[index]}")

    def fingerprint(self) -> str:
        """A fingerprint of which digits these are."""
        return fingerprint.digest("digits", self.ids)


def open_digits(config_data: Data) -> DataSet:
    """'train' (80 % of every class) and 'test' (the rest)."""
    return _open("the data set 'digits'", lambda labels, members: members)


def open_few(config_data: Data) -> DataSet:
    """The same, and of 'train' 'few_S', 10 examples of every class, and 'rest_S', all others; S is 0 to 9, each
    another draw.
    """
    return _open(
        "the data set 'digits_few'", lambda labels, members: members | _few(labels, members)
    )


def _open(where: str, splits: Callable[[np.ndarray, dict], dict]) -> DataSet:
    images, labels = _table()
    grey = np.round(images * (255 / 16)).astype(np.uint8)
    images = np.repeat(grey.reshape(-1, 8, 8, 1), 3, axis=3)
    members = splits(labels, _split(labels))

    def read(parts):
        ids = np.concatenate([members[name][start:stop] for name, start, stop in parts])
        return Digits(images[ids], labels[ids], ids)

    return DataSet(where, {n: len(ids) for n, ids in members.items()}, read)


@functools.cache
def _table() -> tuple[np.ndarray, np.ndarray]:
    """Pixels (1797, 64) from 0 to 16 and labels (1797,), from scikit-learn's file: to import its `load_digits` takes
    a second and a half, a third of a short run's start.
    """
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations
    table = np.loadtxt(os.path.join(package, "datasets", "data", "digits.csv.gz"), delimiter=",")
    return table[:, :-1], table[:, -1].astype(int)


def _split(labels: np.ndarray) -> dict[str, np.ndarray]:
    """The examples of 'train' and 'test', the same share of every class."""
    random = np.random.RandomState(0)  # unlike a Generator's, its stream is frozen forever
    test = []
    for label in range(10):
        ids = random.permutation(np.flatnonzero(labels == label))
        test.append(ids[: round(len(ids) * _TEST_SHARE)])
    test = np.sort(np.concatenate(test))
    return {"train": np.setdiff1d(np.arange(len(labels)), test), "test": test}


def _few(labels: np.ndarray, members: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    splits = {}
    train = members["train"]
    for draw in range(_DRAWS):
        shuffled = np.random.RandomState(draw).permutation(train)
        few = [shuffled[labels[shuffled] == label][:_FEW] for label in range(10)]
        splits[f"few_{draw}"] = np.sort(np.concatenate(few))
        splits[f"rest_{draw}"] = np.setdiff1d(train, splits[f"few_{draw}"])
    return splits
