"""Lists of examples whose labels are known before an image is read: their classes, and the share of
them that is held out.

Lives here: what `folder.py`, `listed.py` and `tar.py` have in common. How each finds its images and
labels is said there.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.data.record import DataSet, Source

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".npy")
HELD_OUT = ("test", "val", "validation")  # what 'test' may be called, the first that is there

Label = int | tuple[int, ...]


@dataclasses.dataclass
class Table:
    """All examples of a data set.

    Attributes:
      where: what errors call it.
      classes: the label names.
      multi_label: whether labels are tuples.
      splits: per split the (key, label) of its examples; what a key is, the file that made the
        table knows.
    """

    where: str
    classes: tuple[str, ...]
    multi_label: bool
    splits: Mapping[str, list[tuple[Any, Label]]]

    def data_set(self, make: Callable[..., Source]) -> DataSet:
        """A data set whose splits are `make(classes, multi_label, keys, labels)`."""
        if len(self.classes) < 2:
            raise ConfigError(
                f"{self.where} has only one class, {self.classes[0]!r}: a classifier needs two or more"
            )

        def read(parts):
            rows = [row for name, start, stop in parts for row in self.splits[name][start:stop]]
            keys, labels = zip(*rows, strict=True)
            labels = labels if self.multi_label else np.asarray(labels, np.int32)
            return make(self.classes, self.multi_label, keys, labels)

        sizes = {name: len(rows) for name, rows in self.splits.items()}
        held_out = [name for name in HELD_OUT if name in sizes]
        aliases = {"test": held_out[0]} if held_out and "test" not in sizes else {}
        return DataSet(self.where, sizes, read, aliases, self.digest)

    def digest(self) -> str:
        """A fingerprint of the classes and of every example's key and label, in order."""
        digest = hashlib.sha256(repr((self.classes, self.multi_label)).encode())
        for name, rows in self.splits.items():
            digest.update(repr((name, len(rows))).encode())
            for row in rows:
                digest.update(repr(row).encode())
        return digest.hexdigest()


def hold_out(rows: Sequence[tuple], share: float, name: Callable[[Any], str] = str) -> dict:
    """`rows` as 'train' and 'test'; on which side one falls depends on the `name` of its key alone.

    So further examples move none from one side to the other.
    """
    members = {"train": [], "test": []}
    for row in rows:
        digest = hashlib.blake2b(name(row[0]).encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") < share * 2**64
        members["test" if held_out else "train"].append(row)
    return members


def number_labels(
    texts: Sequence[str | Sequence[str]], names_file, where: Callable[[int], str]
) -> tuple[tuple[str, ...], list[Label]]:
    """The classes, and the label of every example.

    Args:
      texts: class numbers or class names as text; of a multi-label set, a list of them for each
        example.
      names_file: a path: the names of the classes, one a line, if there is such a file; else the
        classes are those that occur, names sorted.
      where: what to call example i in errors.

    Raises:
      ConfigError: a label is not among the classes.
    """
    multi_label = bool(texts) and not isinstance(texts[0], str)
    occurring = set().union(*texts) if multi_label else set(texts)
    numbered = all(re.fullmatch(r"-?\d+", text) for text in occurring)
    if names_file.exists():
        lines = (line.strip() for line in names_file.read_text().split("\n"))
        classes = tuple(line for line in lines if line)
    elif numbered:
        classes = tuple(map(str, range(max(map(int, occurring), default=-1) + 1)))
    else:
        classes = tuple(sorted(occurring, key=natural))
    index = {name: label for label, name in enumerate(classes)}

    def number(text: str, i: int) -> int:
        label = int(text) if numbered else index.get(text, -1)
        if not 0 <= label < len(classes):
            count = f"there are {len(classes)} classes, 0 to {len(classes) - 1}"
            known = count if numbered else f"see {names_file}"
            raise ConfigError(f"{where(i)}: the label {text!r} is out of range: {known}")
        return label

    if multi_label:
        return classes, [tuple(number(text, i) for text in few) for i, few in enumerate(texts)]
    return classes, [number(text, i) for i, text in enumerate(texts)]


def natural(name: str) -> tuple:
    """A sorting key by which 'class2' comes before 'class10'."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ), name


def label_at(labels: np.ndarray | tuple, index: int) -> Label:
    """The label of an example, of (n,) integers or a tuple of tuples."""
    return labels[index] if isinstance(labels, tuple) else int(labels[index])
