"""Lists of examples whose labels are known before an image is read: their classes, and the share of
them that is held out.

Lives here: what `folder.py`, `listed.py` and `tar.py` have in common. How each finds its images and
labels is described there.
"""

import dataclasses
import hashlib
import math
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Label, Labels, Source
from vit_jax.data.sources.label_texts import check_no_scores, read_vectors
from vit_jax.data.sources.split_names import aliases, has_both_sides
from vit_jax.data.sources.summary import Summary, count_labels
from vit_jax.data.sources.text import read_text, same_text

if TYPE_CHECKING:
    from vit_jax.data.sources.examined import Examined

SUFFIXES = (
    ".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".npy", ".avif", ".heic", ".heif",
)  # fmt: skip
# Class numbers may leave gaps: a few images of a large data set have few of its classes. Beyond
# this they are taken for identifiers.
_MAX_CLASSES_PER_LABEL = 100
_ALWAYS_ALLOWED = 1000
_NUMBER = re.compile(r"\d+")


@dataclasses.dataclass
class Table:
    """All examples of a data set.

    Attributes:
      where: what errors call it.
      classes: the label names; empty where the images have no labels.
      multi_label: whether labels are tuples.
      splits: per split the (key, label) of its examples; what a key is, the file that made the
        table knows.
      examined: what was found in the files that are keys, if they were read.
      spelled: name of a split as it is written → the split that it stands for.
      held_out: whether 'test' is held out, so that the source does not name it.
      labels_from, skipped: see `summary.Summary`.
    """

    where: str
    classes: tuple[str, ...]
    multi_label: bool
    splits: Mapping[str, list[tuple[Any, Label]]]
    examined: "Examined | None" = None
    spelled: Mapping[str, str] = dataclasses.field(default_factory=dict)
    held_out: bool = False
    labels_from: str = ""
    skipped: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def data_set(self, make: Callable[..., Source]) -> DataSet:
        """A data set whose splits are `make(classes, multi_label, keys, labels)`."""

        def read(parts):
            rows = [row for name, start, stop in parts for row in self.splits[name][start:stop]]
            keys, labels = zip(*rows, strict=True)
            if not self.classes:
                labels = None
            elif not self.multi_label:
                labels = np.asarray(labels, np.int32)
            return make(self.classes, self.multi_label, keys, labels)

        sizes = {name: len(rows) for name, rows in self.splits.items()}
        return DataSet(
            self.where,
            sizes,
            read,
            aliases(sizes, self.spelled),
            lambda: digest_rows(self.classes, self.multi_label, sizes, self.splits),
            self._summarize() if self.labels_from else None,
        )

    def _summarize(self) -> Summary:
        def counts() -> dict[str, np.ndarray]:
            by_split = {}
            for name, rows in self.splits.items():
                labels = [label for _, label in rows]
                as_array = labels if self.multi_label else np.asarray(labels, np.int64)
                by_split[name] = count_labels(as_array, len(self.classes))
            return by_split

        sizes = {name: len(rows) for name, rows in self.splits.items()}
        return Summary(
            self.where,
            sizes,
            self.spelled,
            self.held_out,
            self.classes,
            counts,
            self.labels_from,
            self.skipped,
        )


def digest_rows(
    classes: tuple[str, ...],
    multi_label: bool,
    sizes: Mapping[str, int],
    rows: Mapping[str, Iterable[tuple[Any, Label]]],
) -> str:
    """A fingerprint of the classes and of every example's key and label, by split and in order."""
    digest = hashlib.sha256(repr((classes, multi_label)).encode())
    for name, of_split in rows.items():
        digest.update(repr((name, sizes[name])).encode())
        for row in of_split:
            digest.update(repr(row).encode())
    return digest.hexdigest()


def with_held_out(
    members: Mapping[str, list[tuple[Any, Label]]],
    config_data: Data,
    where: str,
    name: Callable[[Any], str] = str,
    examined: "Examined | None" = None,
) -> tuple[dict[str, list[tuple[Any, Label]]], bool]:
    """The examples of each split, and whether 'test' is held out: of all examples if there are no splits ('' alone),
    or of `config.data.holdout_from` if no split is to judge by. Other arguments as for `hold_out`.
    """
    held_out_of = held_out_split(members, config_data)
    if held_out_of is None:
        return dict(members), False
    others = {split: rows for split, rows in members.items() if split != held_out_of}
    held_out_parts = hold_out(members[held_out_of], config_data, where, name, examined)
    return held_out_parts | others, True


def held_out_split(splits: Collection[str], config_data: Data) -> str | None:
    """The split from which the share `config_data.holdout` becomes 'test'; `None` if nothing is held out.

    Raises:
      ConfigError: `config_data.holdout_from` is no split.
    """
    chosen = config_data.holdout_from
    if chosen not in ("", "train", *splits):
        known = ", ".join(filter(None, splits)) or "none"
        raise ConfigError(
            f"config.data.holdout_from = {chosen!r} is no split of the data, which has: {known}"
        )
    if set(splits) == {""}:
        return ""
    if chosen not in splits or has_both_sides(splits):
        return None
    return chosen


def hold_out(
    rows: Sequence[tuple[Any, Label]],
    config_data: Data,
    where: str,
    name: Callable[[Any], str] = str,
    examined: "Examined | None" = None,
) -> dict[str, list[tuple[Any, Label]]]:
    """`rows` as 'train' and 'test', the share `config_data.holdout` of them in 'test'.

    Every image has a number in [0, 1): a hash of its bytes, if it was `examined` and can be read, else of the `name` of
    its key. Copies, byte for byte, are on the side of the first of them. By `holdout_by`, 'test' are

      file: the images whose number is below the share. More images move none from one side to the
        other.
      class: of every class, the images with the smallest numbers, as many as the share of the class
        is, rounded; at least one on each side where a class has two. More images of a class may
        move others of it between the sides, the ones whose numbers are next to the border and no
        more than were added; other classes stay as they are.

    Raises:
      ConfigError: by class, where images do not have one label each.
    """
    marks = examined.marks if examined else {}
    numbers = np.fromiter(
        (marks[key] if key in marks else name_number(name(key)) for key, _ in rows),
        np.uint64,
        len(rows),
    )
    labels = [label for _, label in rows]
    if all(isinstance(label, int) for label in labels):
        labels = np.asarray(labels, np.int64)
    if examined:
        numbers, firsts, group = np.unique(numbers, return_index=True, return_inverse=True)
        labels = labels[firsts] if isinstance(labels, np.ndarray) else labels
        outs = held_out(numbers, labels, config_data, where)[group]
    else:
        outs = held_out(numbers, labels, config_data, where)
    members = {"train": [], "test": []}
    for row, out in zip(rows, outs, strict=True):
        members["test" if out else "train"].append(row)
    return members


def held_out(
    numbers: np.ndarray, labels: Labels | Sequence[Label], config_data: Data, where: str
) -> np.ndarray:
    """Which examples are held out, (n,) bool; see `hold_out`.

    Args:
      numbers: (n,) uint64, `name_number` of each.
      labels: of each, used by class alone: (n,) integers, or else they have not one label each.
    """
    if config_data.holdout_by == "class":
        return _smallest_of_each_class(numbers, labels, config_data.holdout, where)
    below = math.ceil(config_data.holdout * 2**64)  # exact: no number is rounded
    return numbers <= np.uint64(below - 1) if below else np.zeros(len(numbers), bool)


def name_number(name: str) -> int:
    """A hash of a file name, below 2**64."""
    encoded = name.encode("utf-8", "surrogateescape")  # names of files may be any bytes
    digest = hashlib.blake2b(encoded, digest_size=8).digest()
    return int.from_bytes(digest, "big")


def _smallest_of_each_class(
    numbers: np.ndarray, labels: Labels | Sequence[Label], share: float, where: str
) -> np.ndarray:
    """Whether each example is one of those of its class with the smallest numbers, (n,) bool."""
    if not isinstance(labels, np.ndarray):
        multi_label = labels is not None and any(isinstance(label, tuple) for label in labels)
        raise ConfigError(
            f"config.data.holdout_by = 'class' needs one label for each image, and those of "
            f"{where} have {'several' if multi_label else 'none'}: hold out by 'file'"
        )
    order = np.lexsort((numbers, labels))
    counts = np.bincount(labels)
    out = [round(share * count) for count in counts.tolist()]
    if 0 < share < 1:
        both = counts > 1
        out = np.where(both, np.clip(out, 1, np.maximum(counts - 1, 1)), out)
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)
    held = np.zeros(len(labels), bool)
    held[order] = place < np.repeat(out, counts)
    return held


def number_labels(
    texts: Sequence[str | Sequence[str] | None],
    names_file: epath.Path,
    where: Callable[[int], str],
    names: Sequence[str] | None = None,
) -> tuple[tuple[str, ...], bool, list[Label]]:
    """The classes, whether examples have several labels each, and the label of every example.

    Args:
      texts: the class number or class name of each example as text, or a list of them, or `None`
        if it has no label. If one has a list, all are taken to have several labels. Vectors of 0 and 1 are understood,
        see `label_texts.read_vectors`.
      names_file: a path: the names of the classes, one a line, if there is such a file; else the
        classes are those that occur, names sorted.
      where: what to call example i in errors.
      names: of the classes, where the source has them itself; labels are then among them.

    Raises:
      ConfigError: some examples have a label and others none, a label is not among the classes, or
        the numbers leave so many classes empty that they cannot be class numbers.
    """
    numbers_are_names = bool(names)
    if not names and names_file.exists():
        names = [line for line in map(str.strip, read_text(names_file).split("\n")) if line]
    texts, vector_length = read_vectors(texts, None if names is None else len(names), where)
    without = [i for i, text in enumerate(texts) if text is None]
    if len(without) == len(texts):
        return (), False, list(texts)
    if without:
        labelled = next(i for i, text in enumerate(texts) if text is not None)
        raise ConfigError(
            f"{where(without[0])} has no label, but {where(labelled)} has one: either all images have "
            "labels, or none"
        )
    multi_label = any(not isinstance(text, str) for text in texts)
    if multi_label:
        texts = [(text,) if isinstance(text, str) else tuple(text) for text in texts]
    occurring = set().union(*texts) if multi_label else set(texts)
    if not all(map(str.isascii, occurring)):
        form = _one_form(occurring, names or ())
        texts = [tuple(form[t] for t in text) if multi_label else form[text] for text in texts]
        occurring = set(form.values())
    if not occurring and names is None and not vector_length:
        return (), False, [None] * len(texts)
    numbered = all(re.fullmatch(r"-?\d+", text) for text in occurring) and not numbers_are_names
    if names is None:
        check_no_scores(occurring, names_file, where(0))
    if names is not None:
        classes = tuple(names)
    elif vector_length:
        classes = tuple(map(str, range(vector_length)))
    elif numbered:
        classes = _numbered_classes(occurring, names_file)
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
        labels = [tuple(number(text, i) for text in few) for i, few in enumerate(texts)]
    else:
        labels = [number(text, i) for i, text in enumerate(texts)]
    return classes, multi_label, labels


def _one_form(texts: set[str], names: Sequence[str]) -> dict[str, str]:
    """Each text → the form in which it is used: texts that differ only in how accents are stored are one, as the names
    of classes have it.
    """
    forms = {same_text(text): text for text in [*sorted(texts, reverse=True), *names]}
    return {text: forms[same_text(text)] for text in texts}


def _numbered_classes(occurring: set[str], names_file: epath.Path) -> tuple[str, ...]:
    """The classes 0 to the largest number."""
    numbers = set(map(int, occurring))
    count = max(numbers, default=-1) + 1
    if count > max(_ALWAYS_ALLOWED, _MAX_CLASSES_PER_LABEL * len(numbers)):
        raise ConfigError(
            f"the labels are {len(numbers)} numbers up to {count - 1}, which would make {count} classes. "
            f"Number the classes from 0, or give them names; or, if there are so many, list them in {names_file}"
        )
    return tuple(map(str, range(count)))


def is_image_name(name: str) -> bool:
    """Whether a file's name ends like an image's."""
    return os.path.splitext(name)[1].lower() in SUFFIXES


def natural(name: str) -> str:
    """A sorting key by which 'class2' comes before 'class10'; of equal numbers and texts, such as 2 and 02, the
    name decides.
    """
    # One text: tuples of parts would take five times the memory, and there may be millions of names.
    return _NUMBER.sub(_sortable, name) + "\0\0" + name


def _sortable(number: re.Match) -> str:
    """A text that sorts as the number does: first those with fewer digits."""
    digits = str(int(number[0]))
    return f"\0{chr(len(digits))}{digits}"


def label_at(labels: Labels, index: int) -> Label:
    """The label of an example; see `record.Labels`."""
    if labels is None:
        return None
    return labels[index] if isinstance(labels, tuple) else int(labels[index])
