"""Parquet files as the Hugging Face hub has data sets of images, on a disk or in a bucket; see `parquet_index.py`.

An image is one read where its page is stored as it is, as `datasets` writes it from version 5 on. Else its page is read
and decompressed, and a few of these are kept. Splits are words in the names of files: train-00000-of-00002.parquet.
"""

import collections
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.decoding.images import check_bytes
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Labels, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.columns import Index
from vit_jax.data.sources.label_texts import LabelText
from vit_jax.data.sources.parquet_index import KIND
from vit_jax.data.sources.parquet_pages import decompress
from vit_jax.data.sources.ranges import Ranges
from vit_jax.data.sources.split_names import splits_of_files
from vit_jax.data.sources.stored_index import find_records
from vit_jax.data.sources.table import (
    Table,
    is_image_name,
    label_at,
    natural,
    number_labels,
    with_held_out,
)
from vit_jax.data.sources.trees import Tree

SUFFIX = ".parquet"
_FOLDERS = ("", "data", "default")  # of a data set, in which the hub has its files
_IN_COMMON = {  # fields of the note that all files have in common, and their names in errors
    "image": "the column of images",
    "label": "the column of labels",
    "names": "the names of classes",
}
_METADATA = "metadata.parquet"  # of images that are files, see `metadata.py`
_KEPT = 1 << 28  # bytes of pages
_FEW = 5  # images in a compressed page, beyond which reading in random order is slow

_Row = tuple[int, int]  # number of the file, row in it


class _Page(NamedTuple):
    """A page of a file.

    Attributes:
      file: its number.
      first, size: where its bytes are.
      inflated: how many bytes it has without compression; 0: it is stored as it is.
    """

    file: int
    first: int
    size: int
    inflated: int


class _Place(NamedTuple):
    """Where an image is.

    Attributes:
      first, size: where its bytes are, in the file if the page is stored as it is, else in the page; no bytes: there is
        no image.
    """

    first: int
    size: int
    page: _Page


class ParquetImages:
    """Images in Parquet files."""

    def __init__(
        self,
        files: Sequence[str],
        index: Index,
        classes: tuple[str, ...],
        multi_label: bool,
        rows: Sequence[_Row],
        labels: Labels,
    ):
        """Args:
        files: their paths.
        index: of them.
        rows: of the examples.
        """
        self.classes = classes
        self.multi_label = multi_label
        self.labels = labels
        self._files = tuple(files)
        self._rows = tuple(rows)
        self._index = index
        self._values = _StoredValues(self._files, index)

    def __reduce__(self):
        # The index is mapped into memory, so that another process opens it for itself.
        described = (self.classes, self.multi_label, self._rows, self.labels)
        return _reopen, (self._files, *described)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; all reads are requested at once.

        Raises:
          BadImage: one of them cannot be read.
        """
        rows = [self._rows[index] for index in indices]
        names = [f"{self._files[file]}, row {row}" for file, row in rows]
        images = self._values.read(rows, names)
        labels = [label_at(self.labels, index) for index in indices]
        return list(map(Record, images, labels, names))

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the rows, the sizes of the files and all labels."""
        described = list(self._index.files.values())
        sizes = [
            (os.path.basename(path), described[self._index.number(path)].size)
            for path in self._files
        ]
        rows = [self._rows[i] for i in fingerprint.sampled(len(self))]
        labels = fingerprint.of_labels(self.labels)
        return fingerprint.digest(self.classes, len(self), rows, sizes, labels)


def _reopen(files: Sequence[str], *described) -> ParquetImages:
    return ParquetImages(files, find_records(files, KIND), *described)


class _StoredValues:
    """The images of Parquet files by row; the pages decompressed last are kept. Any number of threads may use it."""

    def __init__(self, files: Sequence[str], index: Index):
        self._files = files
        self._index = index
        self._numbers = [index.number(path) for path in files]
        self._ranges = Ranges()
        self._kept: collections.OrderedDict[_Page, bytes] = collections.OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def read(self, rows: Sequence[_Row], names: Sequence[str]) -> list[bytes]:
        """The encoded images in rows; errors call them by `names`.

        Raises:
          BadImage: a row has no image, or it is damaged.
          DataError: see `Ranges.read`.
        """
        places = [self._place(*row) for row in rows]
        for place, name in zip(places, names, strict=True):
            if not place.size:
                raise BadImage(name, "the row has no image")
            check_bytes(place.size, name)
        pages = self._read_pages(
            {
                place.page: name
                for place, name in zip(places, names, strict=True)
                if place.page.inflated
            }
        )
        direct = [place for place in places if not place.page.inflated]
        contents = self._ranges.read_many(
            [(self._files[place.page.file], place.first, place.size) for place in direct]
        )
        following = iter(contents)
        return [
            pages[place.page][place.first : place.first + place.size]
            if place.page.inflated
            else next(following)
            for place in places
        ]

    def _place(self, file: int, row: int) -> _Place:
        """Where an image is."""
        number = self._numbers[file]
        page = int(self._index.column("page", number)[row])
        return _Place(
            int(self._index.column("first", number)[row]),
            int(self._index.column("size", number)[row]),
            _Page(
                file,
                int(self._index.column("page_first", number)[page]),
                int(self._index.column("page_size", number)[page]),
                int(self._index.column("page_inflated", number)[page]),
            ),
        )

    def _read_pages(self, wanted: Mapping[_Page, str]) -> dict[_Page, bytes]:
        """Compressed pages as they are without compression.

        Args:
          wanted: page → the name of an image in it, for errors.
        """
        with self._lock:
            pages = {page: self._kept[page] for page in wanted if page in self._kept}
            for page in pages:
                self._kept.move_to_end(page)
        missing = [page for page in wanted if page not in pages]
        contents = self._ranges.read_many(
            [(self._files[page.file], page.first, page.size) for page in missing]
        )
        for page, content in zip(missing, contents, strict=True):
            codec = self._index.notes[self._numbers[page.file]]["codec"]
            try:
                pages[page] = decompress(content, page.inflated, codec)
            except OSError as error:
                raise BadImage(wanted[page], f"its page is damaged in the file: {error}") from None
        with self._lock:
            for page in missing:
                if page not in self._kept:
                    self._kept[page] = pages[page]
                    self._kept_bytes += page.inflated
            while len(self._kept) > 1 and self._kept_bytes > _KEPT:
                page, _ = self._kept.popitem(last=False)
                self._kept_bytes -= page.inflated
        return pages


def find_parquet(tree: Tree) -> list[str]:
    """The Parquet files of a data set in a folder, from the root; none if it has images as files."""
    others = [name for name in tree.folders("") if name not in _FOLDERS]
    if others or any(map(is_image_name, tree.files(""))):
        return []
    for folder in _FOLDERS:
        names = tree.files(folder)
        files = [name for name in names if name.lower().endswith(SUFFIX)]
        if files and _METADATA not in files and not any(map(is_image_name, names)):
            return [os.path.join(folder, name) for name in files]
    return []


def open_parquet(paths: Sequence[str], where: str, config_data: Data) -> DataSet:
    """The images in Parquet files. Without splits in their names, a share becomes 'test'; see `table.hold_out`.

    Args:
      paths: of the files.
      where: the name of the data set in errors.

    Raises:
      ConfigError: a file is damaged, has no column of images, no one column of labels, or other columns than another.
    """
    files = sorted(paths, key=natural)
    basenames = list(map(os.path.basename, files))
    index = find_records(files, KIND)
    about = _common_note(index, files)
    words = splits_of_files(basenames)
    rows: list[_Row] = []
    texts: list[LabelText] = []
    unlabelled = {}
    for split, numbers in _by_split(words).items():
        rows_of_split, texts_of_split = _labelled_rows(index, files, numbers)
        if about["label"] and all(text is None for text in texts_of_split):
            unlabelled[f"rows of {split or 'the files'} without a label"] = len(rows_of_split)
        else:
            rows += rows_of_split
            texts += texts_of_split
    if not rows:
        raise ConfigError(f"{where} has no rows with a label in the column {about['label']!r}")
    classes, multi_label, labels = number_labels(
        texts,
        epath.Path(os.path.dirname(files[0])) / "classes.txt",
        lambda i: f"{files[rows[i][0]]}, row {rows[i][1]}",
        about["names"] or None,
    )
    members: dict[str, list] = {}
    for row, number in zip(rows, labels, strict=True):
        members.setdefault(words[row[0]], []).append((row, number))
    if "" in members and len(members) > 1:
        raise ConfigError(
            f"{where}: the names of some files have a split, that of {basenames[words.index('')]} has none: move or "
            "rename it"
        )

    def name(row: _Row) -> str:
        return f"{basenames[row[0]]}/{row[1]}"

    members, is_held_out = with_held_out(members, config_data, where, name)
    _warn_of_large_pages(where, index, files)
    table = Table(
        where,
        classes,
        multi_label,
        members,
        held_out=is_held_out,
        labels_from=f"the column {about['label']!r}" if about["label"] else "no column",
        skipped=unlabelled,
    )
    return table.data_set(lambda *described: ParquetImages(files, index, *described))


def _common_note(index: Index, files: Sequence[str]) -> Mapping[str, Any]:
    """The note that `parquet_index` has of every file; they agree in it.

    Raises:
      ConfigError: one has another column of images or of labels, or other classes.
    """
    first, *others = files
    about = index.notes[index.number(first)]
    for path in others:
        note = index.notes[index.number(path)]
        for field, what in _IN_COMMON.items():
            if note[field] != about[field]:
                raise ConfigError(
                    f"{path} and {first} differ in {what}: {_shown(note[field])} and {_shown(about[field])}"
                )
    return about


def _shown(value: str | Sequence[str]) -> str:
    """A field of a note in an error."""
    text = value if isinstance(value, str) else ", ".join(value)
    return text or "none"


def _by_split(words: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of the files of each split."""
    files: dict[str, list[int]] = {}
    for number, word in enumerate(words):
        files.setdefault(word, []).append(number)
    return files


def _labelled_rows(
    index: Index, files: Sequence[str], numbers: Sequence[int]
) -> tuple[list[_Row], list[LabelText]]:
    """The rows of the files with `numbers`, and their labels as text."""
    rows: list[_Row] = []
    texts: list[LabelText] = []
    for number in numbers:
        codes = index.column("code", index.number(files[number])).tolist()
        rows += [(number, row) for row in range(len(codes))]
        texts += [index.table[code] for code in codes]
    return rows, texts


def _warn_of_large_pages(where: str, index: Index, files: Sequence[str]) -> None:
    """Warns of compressed pages that have many images each, and are too large together to be kept."""
    pages = 0
    inflated = 0
    images = 0
    for number in map(index.number, files):
        sizes = index.column("page_inflated", number).astype(np.int64)
        counts = np.bincount(index.column("page", number), minlength=len(sizes))
        is_packed = (sizes > 0) & (counts > 0)
        pages += np.count_nonzero(is_packed)
        inflated += int(sizes[is_packed].sum())
        images += int(counts[is_packed].sum())
    if inflated > _KEPT and images > _FEW * pages:
        logging.warning(
            "%s: %d images are decompressed for each one in random order, since its Parquet files are compressed: "
            "store it once with 'vit_jax prepare', or write them again with datasets 5", where, images // pages,
        )  # fmt: skip
