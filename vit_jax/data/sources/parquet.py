"""Parquet files as the Hugging Face hub has data sets of images: a column of structs of `bytes` and `path` (or of bytes
alone), and one of labels, whose names stand in the schema's metadata.

An image is read with its row group, 100 images in files that `datasets` writes; a few row groups are kept. Splits are
words in the names of files: train-00000-of-00002.parquet.
"""

import collections
import json
import os
import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Labels, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.label_texts import LabelText
from vit_jax.data.sources.split_names import splits_of_files
from vit_jax.data.sources.table import (
    Table,
    is_image_name,
    label_at,
    natural,
    number_labels,
    with_held_out,
)
from vit_jax.data.sources.trees import Tree

if TYPE_CHECKING:
    import pyarrow
    import pyarrow.parquet

SUFFIX = ".parquet"
_FOLDERS = ("", "data", "default")  # of a data set, in which the hub has its files
_LABELS = ("label", "labels")
_IMAGES = ("image", "img")
_KEPT = 1 << 28  # bytes of row groups
_LARGE_GROUP = 1000  # images, beyond which reading in random order is slow
_NO_LABEL = -1  # as the hub has it in tests whose labels are secret

_Row = tuple[int, int]  # number of the file, row in it


class ParquetImages:
    """Images in Parquet files."""

    def __init__(
        self,
        files: Sequence[str],
        column: str,
        classes: tuple[str, ...],
        multi_label: bool,
        rows: Sequence[_Row],
        labels: Labels,
    ):
        """Args:
        files: their paths.
        column: of the images.
        rows: of the examples.
        """
        self.classes = classes
        self.multi_label = multi_label
        self.labels = labels
        self._files = tuple(files)
        self._column = column
        self._rows = tuple(rows)
        self._groups = _RowGroups(self._files, column)

    def __reduce__(self):
        state = self._files, self._column, self.classes, self.multi_label, self._rows, self.labels
        return ParquetImages, state

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; each row group is read once."""
        records: dict[int, Record] = {}
        for index in sorted(set(indices), key=lambda index: self._rows[index]):
            file, row = self._rows[index]
            name = f"{self._files[file]}, row {row}"
            image = self._groups.image(file, row)
            if image is None:
                raise BadImage(name, "the row has no image")
            records[index] = Record(image, label_at(self.labels, index), name)
        return [records[index] for index in indices]

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the rows, the sizes of the files and all labels."""
        sizes = [(os.path.basename(path), os.path.getsize(path)) for path in self._files]
        rows = [self._rows[i] for i in fingerprint.sampled(len(self))]
        labels = fingerprint.of_labels(self.labels)
        return fingerprint.digest(self.classes, len(self), rows, sizes, labels)


class _RowGroups:
    """The images of Parquet files by row; the row groups read last are kept. Any number of threads may use it."""

    def __init__(self, files: Sequence[str], column: str):
        self._files = files
        self._column = column
        self._kept: collections.OrderedDict[tuple[int, int], tuple[pyarrow.Array, int]]
        self._kept = collections.OrderedDict()
        self._lock = threading.Lock()
        self._of_thread = threading.local()
        self._starts: dict[int, np.ndarray] = {}

    def image(self, file: int, row: int) -> bytes | None:
        """The encoded image in a row; `None` if there is none."""
        if file not in self._starts:
            self._starts[file] = _group_starts(self._open(file).metadata)
        starts = self._starts[file]
        group = int(np.searchsorted(starts, row, "right")) - 1
        return self._read_group(file, group)[row - int(starts[group])].as_py()

    def _read_group(self, file: int, group: int) -> "pyarrow.Array":
        with self._lock:
            if (file, group) in self._kept:
                self._kept.move_to_end((file, group))
                return self._kept[file, group][0]
        column = self._open(file).read_row_group(group, columns=[self._column]).column(0)
        images = column.combine_chunks()
        images = images.field("bytes") if hasattr(images, "field") else images
        with self._lock:
            self._kept[file, group] = images, images.nbytes
            while len(self._kept) > 1 and sum(size for _, size in self._kept.values()) > _KEPT:
                self._kept.popitem(last=False)
        return images

    def _open(self, file: int) -> "pyarrow.parquet.ParquetFile":
        """The file, opened by this thread."""
        opened = self._of_thread.__dict__.setdefault("opened", {})
        if file not in opened:
            opened[file] = open_parquet_file(self._files[file])
        return opened[file]


def open_parquet_file(path: str) -> "pyarrow.parquet.ParquetFile":
    """A Parquet file on a disk.

    Raises:
      ConfigError: pyarrow is not installed, or the file is damaged.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: {pip_install('parquet')}") from error
    try:
        return pyarrow.parquet.ParquetFile(path, memory_map=True)
    except (OSError, pyarrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as a Parquet file: {error}") from None


def find_parquet(tree: Tree) -> list[str]:
    """The Parquet files of a data set in a folder, from the root; none if it has images as files."""
    others = [name for name in tree.folders("") if name not in _FOLDERS]
    if others or any(map(is_image_name, tree.files(""))):
        return []
    for folder in _FOLDERS:
        names = tree.files(folder)
        files = [name for name in names if name.lower().endswith(SUFFIX)]
        if files and not any(map(is_image_name, names)):
            return [os.path.join(folder, name) for name in files]
    return []


def open_parquet(paths: Sequence[str], where: str, config_data: Data) -> DataSet:
    """The images in Parquet files. Without splits in their names, a share becomes 'test'; see `table.hold_out`.

    Args:
      paths: of the files.
      where: the name of the data set in errors.

    Raises:
      ConfigError: a file is damaged, has no column of images, or no one column of labels.
    """
    if any(map(places.in_bucket, paths)):
        raise ConfigError(f"{where}: Parquet files are read from a disk: copy them there")
    files = sorted(paths, key=natural)
    basenames = list(map(os.path.basename, files))
    opened = [open_parquet_file(path) for path in files]
    schema = opened[0].schema_arrow
    column = _image_column(schema, where)
    features = _features(schema)
    label = _label_column(schema, features, where)
    words = splits_of_files(basenames)
    rows: list[_Row] = []
    texts: list[LabelText] = []
    unlabelled = {}
    for split, numbers in _by_split(words).items():
        rows_of_split, texts_of_split = _read_labels(opened, numbers, label, where)
        if label and all(text is None for text in texts_of_split):
            unlabelled[f"rows of {split or 'the files'} without a label"] = len(rows_of_split)
        else:
            rows += rows_of_split
            texts += texts_of_split
    if not rows:
        raise ConfigError(f"{where} has no rows with a label in the column {label!r}")
    names = _class_names(features.get(label, {}))
    classes, multi_label, labels = number_labels(
        [_named(text, names) for text in texts] if names else texts,
        epath.Path(os.path.dirname(files[0])) / "classes.txt",
        lambda i: f"{files[rows[i][0]]}, row {rows[i][1]}",
        names or None,
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
    _warn_of_large_groups(where, opened)
    table = Table(
        where,
        classes,
        multi_label,
        members,
        held_out=is_held_out,
        labels_from=f"the column {label!r}" if label else "no column",
        skipped=unlabelled,
    )
    return table.data_set(lambda *described: ParquetImages(files, column, *described))


def _by_split(words: Sequence[str]) -> dict[str, list[int]]:
    """The numbers of the files of each split."""
    files: dict[str, list[int]] = {}
    for number, word in enumerate(words):
        files.setdefault(word, []).append(number)
    return files


def _read_labels(
    opened: Sequence["pyarrow.parquet.ParquetFile"], numbers: Sequence[int], label: str, where: str
) -> tuple[list[_Row], list[LabelText]]:
    """The rows of some files and their labels as text.

    Args:
      opened: all files.
      numbers: of the files to read.
      label: the column; '': there is none.
      where: the name of the data set in errors.
    """
    rows: list[_Row] = []
    texts: list[LabelText] = []
    for number in numbers:
        count = opened[number].metadata.num_rows
        rows += [(number, row) for row in range(count)]
        texts += map(_text, _values(opened[number], label, where)) if label else [None] * count
    return rows, texts


def _image_column(schema: "pyarrow.Schema", where: str) -> str:
    """The name of the column that has encoded images."""
    columns = [field.name for field in schema if _is_image(field.type)]
    known = [name for name in _IMAGES if name in columns]
    if not known and len(columns) != 1:
        raise ConfigError(
            f"{where} has {len(columns)} columns of images ({', '.join(columns) or 'none'}) among "
            f"{', '.join(schema.names)}: one is needed, or one called image; it has bytes, or structs of bytes and path"
        )
    return known[0] if known else columns[0]


def _is_image(kind: "pyarrow.DataType") -> bool:
    import pyarrow.types

    if pyarrow.types.is_struct(kind):
        return "bytes" in [kind.field(i).name for i in range(kind.num_fields)]
    return pyarrow.types.is_binary(kind) or pyarrow.types.is_large_binary(kind)


def _label_column(schema: "pyarrow.Schema", features: Mapping[str, Any], where: str) -> str:
    """The name of the column with the labels; '' if there is none."""
    for name in _LABELS:
        if name in schema.names:
            return name
    named = [name for name in schema.names if _class_names(features.get(name, {}))]
    if len(named) > 1:
        raise ConfigError(
            f"{where} has {len(named)} columns of classes ({', '.join(named)}) and none called label: rename the one "
            "that is meant"
        )
    return named[0] if named else ""


def _features(schema: "pyarrow.Schema") -> dict[str, Any]:
    """What the hub notes of the columns, by their names."""
    metadata = schema.metadata or {}
    noted = json.loads(metadata.get(b"huggingface", b"{}"))
    return noted.get("info", {}).get("features", {})


def _class_names(feature: Mapping[str, Any] | list) -> tuple[str, ...]:
    """The names of classes in a feature, or in the one that it is a list of; () if it has none."""
    if isinstance(feature, list):
        feature = feature[0] if feature else {}
    if feature.get("_type") == "ClassLabel":
        return tuple(feature.get("names", ()))
    inner = feature.get("feature")
    return _class_names(inner) if isinstance(inner, dict) else ()


def _values(file: "pyarrow.parquet.ParquetFile", column: str, where: str) -> list:
    if column not in file.schema_arrow.names:
        raise ConfigError(f"{where}: some files have no column {column!r}, which others have")
    return file.read(columns=[column]).column(0).to_pylist()


def _text(value: Any) -> LabelText:
    """A label as text, or several; `None` where there is none."""
    if value is None or value == _NO_LABEL:
        return None
    if isinstance(value, list):
        return tuple(map(str, value))
    return str(value)


def _named(
    text: str | tuple[str, ...] | None, names: Sequence[str]
) -> str | tuple[str, ...] | None:
    """The names of class numbers that the metadata knows."""
    if isinstance(text, tuple):
        return tuple(names[int(number)] for number in text)
    return None if text is None else names[int(text)]


def _group_starts(metadata: "pyarrow.parquet.FileMetaData") -> np.ndarray:
    """The first row of each row group."""
    counts = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return np.cumsum([0, *counts[:-1]])


def _warn_of_large_groups(where: str, files: Sequence["pyarrow.parquet.ParquetFile"]) -> None:
    largest = max(
        file.metadata.row_group(i).num_rows
        for file in files
        for i in range(file.metadata.num_row_groups)
    )
    if largest > _LARGE_GROUP:
        logging.warning(
            "%s: %d images are read for each one in random order, since its Parquet files have row groups of so many: "
            "store it once with 'vit_jax prepare'", where, largest,
        )  # fmt: skip
