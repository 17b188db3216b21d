"""Lists of image files with their labels: CSV, or JSON lines.

A CSV file has the columns `path` (or `file`; relative to its folder) and `label` (a class number or
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
import os
from collections.abc import Callable, Iterable

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.sources.examined import examine
from vit_jax.data.sources.label_texts import split_labels
from vit_jax.data.sources.split_names import find_splits, trains_twice
from vit_jax.data.sources.table import Table, number_labels, with_held_out
from vit_jax.data.sources.text import json_rows, read_text

_FILE = ("path", "file", "filename")
_LABEL = ("label", "labels", "class", "cls")
_JSON = (".jsonl", ".json", ".ndjson")
_WEB = ("http://", "https://", "ftp://")

_Row = tuple[int, str, str | tuple[str, ...] | None, str]  # line, file, label as text, split


def read_list(path: epath.Path, config_data: Data) -> Table:
    """The images that the file `path` lists. Where it names no splits, some of them are held out as
    'test': see `table.hold_out`; the name that decides is that of the file as seen from the folder
    of the list, however it is spelled there.
    """
    if path.suffix in _JSON:
        rows, is_plural = list(json_rows(path, _FILE, json_label)), False
    else:
        rows, is_plural = _read_csv(path)
    if not rows:
        raise ConfigError(f"{path} lists no images")
    for line, file, _, _ in rows:
        if file.startswith(_WEB):
            raise ConfigError(
                f"{path}, line {line}: {file!r} is a web address: download the images, and list the files"
            )
    fields = [label for _, _, label, _ in rows]
    texts = split_labels(path, fields, config_data.label_separator, is_plural=is_plural)
    classes, multi_label, labels = number_labels(
        texts, path.parent / "classes.txt", lambda i: f"{path}, line {rows[i][0]}"
    )
    examined = examine(os.fspath(path.parent), [file for _, file, _, _ in rows], config_data)
    split_names = dict.fromkeys(split for *_, split in rows)
    spelled = _read_splits(path, split_names)
    members = {}
    for (_, file, _, name), label in zip(rows, labels, strict=True):
        split = spelled.get(name, name)
        members.setdefault(split, []).append((file, label))
    if "" in members and len(members) > 1:
        raise ConfigError(f"{path}: some images have a split, others none")
    folder = os.fspath(path.parent)
    folder = folder if places.in_bucket(folder) else os.path.abspath(folder)
    realpath = functools.lru_cache(1024)(os.path.realpath)  # images come by the folder
    name = functools.partial(_relative, folder, realpath)
    members, is_held_out = with_held_out(members, config_data, str(path), name, examined)
    return Table(
        str(path),
        classes,
        multi_label,
        members,
        examined,
        spelled,
        is_held_out,
        "the list",
    )


def _read_splits(path: epath.Path, names: Iterable[str]) -> dict[str, str]:
    """The meaning of the names of splits in a list: name → split, where the name is understood.

    Raises:
      ConfigError: several are to train on.
    """
    spelled = find_splits(filter(None, names))
    if trains := trains_twice(spelled):
        raise ConfigError(
            f"{path}: the splits {', '.join(map(repr, trains))} are all named like images to train on: write the same "
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
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    rows: list[_Row] = []
    try:
        header = reader.fieldnames or []
        file = next((name for name in _FILE if name in header), None)
        label = next((name for name in ("labels", "label") if name in header), None)
        if file is None or (label is None and set(header) - {file, "split"}):
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
            text = None if label is None else row[label].strip()
            rows.append((reader.line_num, row[file], text, row.get("split", "")))
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: this is no CSV: {error}") from None
    return rows, label == "labels"


def json_label(fields: dict) -> str | tuple[str, ...] | None:
    """The label in a JSON object as text: its field `label`, `labels`, `class` or `cls`, if any."""
    value = next((fields[name] for name in _LABEL if name in fields), None)
    if isinstance(value, list):
        return tuple(str(label).strip() for label in value)
    return None if value is None else str(value).strip()
