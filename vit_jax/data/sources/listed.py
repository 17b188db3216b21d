"""Lists of image files with their labels: CSV, or JSON lines.

A CSV file has the columns `path` (or `file`, `file_name`; relative to its folder) and `label` (a class number or
name), or `labels` (any number of them, separated by ';'), and if you like `split`. In JSON lines each
line is an object with the same fields; a `label` that is a list makes the set multi-label. Other
separators, and vectors of 0 and 1, are understood by `label_texts.py`. A CSV
file with no column but `path` and `split`, or JSON objects without a label, are images without
labels. A file classes.txt beside it, one name a line, fixes the classes; otherwise they are those
that occur.
"""

import csv
import functools
import io
import itertools
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.sources.examined import examine
from vit_jax.data.sources.label_texts import split_labels
from vit_jax.data.sources.split_names import are_splits, find_splits, names_to_train_on
from vit_jax.data.sources.table import Table, number_labels, with_held_out
from vit_jax.data.sources.text import json_rows, read_text

_FILE = ("path", "file", "filename", "file_name")
_LABEL = ("label", "labels", "class", "cls")
_SPLIT = "split"
_MOST_SPLITS = 8  # a column with more different values has no splits
_JSON = (".jsonl", ".json", ".ndjson")
# What people give instead of a list, by the ends of its name.
_NO_LISTS = {
    (".xlsx", ".xls", ".ods", ".numbers"): "is a spreadsheet: save it as CSV, and give that file",
    (
        ".7z",
        ".rar",
    ): "is an archive: unpack it, and give the folder; zip and tar files are read as they are",
    (
        ".tar.gz",
        ".tgz",
        ".tar.bz2",
        ".tar.xz",
        ".tar.zst",
    ): "is a compressed tar file: uncompress it, such as by gunzip, and give the tar file",
    (
        ".npz",
        ".pkl",
        ".pickle",
        ".h5",
        ".hdf5",
        ".mat",
        ".arrow",
        ".feather",
        ".lmdb",
    ): "is no list of images: write "
    "the images as files, and a CSV file with the columns path and label",
}
_WEB = ("http://", "https://", "ftp://")

_Row = tuple[int, str, str | tuple[str, ...] | None, str]  # line, file, label as text, split


class ListedImage(NamedTuple):
    """A line of a list.

    Attributes:
      where: the list.
      line: number of the line.
      file: of the image, from the folder that files are relative to.
      label: as text; a tuple of several; `None` without one.
      split: its name; '' without one.
    """

    where: epath.Path
    line: int
    file: str
    label: str | tuple[str, ...] | None
    split: str


def read_list(path: epath.Path, config_data: Data) -> Table:
    """The images that the file `path` lists. Where it names no splits, some of them are held out as
    'test': see `table.hold_out`; the name that decides is that of the file as seen from the folder
    of the list, however it is spelled there.
    """
    _check_type(path)
    images, is_plural = read_rows(path)
    return make_table(str(path), path.parent, images, is_plural, config_data, "the list")


def read_rows(path: epath.Path) -> tuple[list[ListedImage], bool]:
    """The lines of a list, and whether it is a CSV file whose column of labels is `labels`."""
    if path.suffix in _JSON:
        rows = json_rows(path, _FILE, json_label, _split_field(path))
        is_plural = False
    else:
        rows, is_plural = _read_csv(path)
    images = [ListedImage(path, *row) for row in rows]
    if not images:
        raise ConfigError(f"{path} lists no images")
    for image in images:
        if image.file.startswith(_WEB):
            raise ConfigError(
                f"{path}, line {image.line}: {image.file!r} is a web address: download the images, and list the files"
            )
    return images, is_plural


def make_table(
    where: str,
    root: epath.Path,
    images: Sequence[ListedImage],
    is_plural: bool,
    config_data: Data,
    labels_from: str,
    skipped: Mapping[str, int] | None = None,
) -> Table:
    """The table of listed images.

    Args:
      where: its name in errors.
      root: the folder that their files are relative to.
      images: in the order of the list.
      is_plural: see `read_rows`.
      labels_from, skipped: see `Table`.
    """
    fields = [image.label for image in images]
    texts = split_labels(where, fields, config_data.label_separator, is_plural=is_plural)
    classes, multi_label, labels = number_labels(
        texts, root / "classes.txt", lambda i: f"{images[i].where}, line {images[i].line}"
    )
    examined = examine(os.fspath(root), [image.file for image in images], config_data)
    split_names = dict.fromkeys(image.split for image in images)
    spelled = _read_splits(where, split_names)
    members = {}
    for image, label in zip(images, labels, strict=True):
        split = spelled.get(image.split, image.split)
        members.setdefault(split, []).append((image.file, label))
    if "" in members and len(members) > 1:
        raise ConfigError(f"{where}: some images have a split, others none")
    folder = os.fspath(root)
    folder = folder if places.in_bucket(folder) else os.path.abspath(folder)
    realpath = functools.lru_cache(1024)(os.path.realpath)  # images come by the folder
    name = functools.partial(_relative, folder, realpath)
    members, is_held_out = with_held_out(members, config_data, where, name, examined)
    return Table(
        where,
        classes,
        multi_label,
        members,
        examined,
        spelled,
        is_held_out,
        labels_from,
        skipped or {},
    )


def _check_type(path: epath.Path) -> None:
    """Raises `ConfigError` if a file's name says that it is something else than a list, with what to do."""
    name = path.name.lower()
    for suffixes, what in _NO_LISTS.items():
        if name.endswith(suffixes):
            raise ConfigError(f"config.data.path = {str(path)!r} {what}")


def _read_splits(where: str, names: Iterable[str]) -> dict[str, str]:
    """The meaning of the names of splits in a list: name → split, where the name is understood.

    Raises:
      ConfigError: several are to train on.
    """
    spelled = find_splits(filter(None, names))
    trains = names_to_train_on(spelled)
    if len(trains) > 1:
        raise ConfigError(
            f"{where}: the splits {', '.join(map(repr, trains))} are all named like images to train on: write the same "
            "name for all of them, or another name, such as 'extra', for those that are not trained on"
        )
    return spelled


def _relative(folder: str, realpath: Callable[[str], str], file: str) -> str:
    """A file as seen from the folder of the list: 'a/b.jpg', './a//b.jpg' and '/FOLDER/a/b.jpg' are
    'a/b.jpg'.

    Args:
      folder: absolute, or in a bucket.
      realpath: `os.path.realpath`, with a memory.
      file: as it is listed.
    """
    if places.in_bucket(folder) or places.in_bucket(file):
        return os.path.normpath(file.removeprefix(f"{folder}/"))
    file = os.path.normpath(file)
    if file[0] not in "./":  # the usual case, of which there may be millions
        return file
    path = os.path.join(folder, file)
    relative = os.path.relpath(path, folder)
    if relative.startswith(".."):  # outside, or inside by another way
        parent, name = os.path.split(path)
        real = os.path.relpath(os.path.join(realpath(parent), name), realpath(folder))
        return relative if real.startswith("..") else real
    return relative


def _read_csv(path: epath.Path) -> tuple[list[_Row], bool]:
    """The rows of a CSV file, and whether its column of labels is `labels`."""
    text = read_text(path)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    rows: list[_Row] = []
    try:
        header = reader.fieldnames or []
        split = _split_column(path, header, csv.DictReader(io.StringIO(text, newline="")))
        file = next((name for name in _FILE if name in header), None)
        label = next((name for name in ("labels", "label") if name in header), None)
        if file is None or (label is None and set(header) - {file, split}):
            raise ConfigError(
                f"{path} must begin with the column names path and label, not {','.join(header)!r}; "
                "or with path alone, where images have no labels"
            )
        for row in reader:
            needed = "path and label" if label == "label" else "path"
            empty = not row[file] or (label == "label" and not row[label])
            if None in row or None in row.values() or empty:
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(header)} values are needed, {needed} not empty"
                )
            label_text = None if label is None else row[label].strip()
            rows.append((reader.line_num, row[file], label_text, row.get(split, "")))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: this is no CSV: {error}") from None
    return rows, label == "labels"


def _split_field(path: epath.Path) -> str:
    """The field of a file of JSON lines that has the split, see `_split_column`."""
    lines = filter(str.strip, read_text(path).splitlines())
    try:
        rows = (json.loads(line) for line in lines)
        first = next(rows, {})
        return _split_column(path, list(first), itertools.chain([first], rows))
    except (ValueError, TypeError, AttributeError):
        return _SPLIT  # `json_rows` names the line that is no object


def _split_column(path: epath.Path, header: Sequence[str], rows: Iterable[Mapping]) -> str:
    """The column of splits: `split` in any case, or else the column in which every value names a split, with images to
    train on and images to judge by.

    Without such a column the result is `split`, which no row has.

    Raises:
      ConfigError: there are several such columns.
    """
    named = [name for name in header if str(name).casefold() == _SPLIT]
    others = [name for name in header if name not in (*_FILE, *_LABEL)]
    if named or not others:
        return named[0] if named else _SPLIT
    values: dict[str, set[str]] = {name: set() for name in others}
    for row in rows:
        for name in list(values):
            values[name].add(str(row.get(name, "")))
            if len(values[name]) > _MOST_SPLITS:
                del values[name]
        if not values:
            break
    columns = [name for name, texts in values.items() if are_splits(texts)]
    if len(columns) > 1:
        raise ConfigError(
            f"{path}: the columns {', '.join(columns)} all name splits: call the one that is meant {_SPLIT!r}"
        )
    return columns[0] if columns else _SPLIT


def json_label(fields: dict) -> str | tuple[str, ...] | None:
    """The label in a JSON object as text: its field `label`, `labels`, `class` or `cls`, if any.

    Raises:
      ValueError: it is an object, or a list of lists or objects.
    """
    value = next((fields[name] for name in _LABEL if name in fields), None)
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, dict | list) for item in items):
        raise ValueError(
            f"the label {json.dumps(value)[:60]} is nested: write the name or number of the class, or a list of them"
        )
    if isinstance(value, list):
        return tuple(str(label).strip() for label in value)
    return None if value is None else str(value).strip()
