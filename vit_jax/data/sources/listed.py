"""Lists of image files with their labels: CSV, or JSON lines.

A CSV file has the columns `path` (or `file`; relative to its folder) and `label` (a class number or name), or
`labels` (any number of them, separated by ';'), and if you like `split`. In JSON lines each line is
an object with the same fields; a `label` that is a list makes the set multi-label. A file
classes.txt beside it, one name a line, fixes the classes; otherwise they are those that occur.
"""

import csv
import io
import json
import os
from collections.abc import Iterator

from vit_jax.base.errors import ConfigError
from vit_jax.data.sources.table import Table, hold_out, number_labels

_FILE = ("path", "file", "filename")
_LABEL = ("label", "labels", "class", "cls")
_JSON = (".jsonl", ".json", ".ndjson")


def read_list(path: os.PathLike, holdout: float) -> Table:
    """The images that the file `path` lists; the share `holdout` of them is 'test' where it names no
    splits.
    """
    rows = list(_json_rows(path) if path.suffix in _JSON else _csv_rows(path))
    if not rows:
        raise ConfigError(f"{path} lists no images")
    multi_label = any(not isinstance(label, str) for _, _, label, _ in rows)
    texts = [
        (label if multi_label == (not isinstance(label, str)) else (label,))
        for _, _, label, _ in rows
    ]
    classes, labels = number_labels(
        texts, path.parent / "classes.txt", lambda i: f"{path}, line {rows[i][0]}"
    )
    members = {}
    for (_, file, _, split), label in zip(rows, labels, strict=True):
        members.setdefault(split, []).append((file, label))
    if set(members) == {""}:
        members = hold_out(members[""], holdout)
    elif "" in members:
        raise ConfigError(f"{path}: some images have a split, others none")
    return Table(str(path), classes, multi_label, members)


def _csv_rows(path) -> Iterator[tuple[int, str, str | tuple[str, ...], str]]:
    """(line, file, label, split) of every image; labels are text, or tuples of texts."""
    reader = csv.DictReader(io.StringIO(path.read_bytes().decode("utf-8-sig"), newline=""))
    header = reader.fieldnames or []
    column = "labels" if "labels" in header else "label"
    file = next((name for name in _FILE if name in header), None)
    if file is None or column not in header:
        raise ConfigError(
            f"{path} must begin with the column names path and label, not {','.join(header)!r}"
        )
    for row in reader:
        empty = not row[file] or (column == "label" and not row["label"])
        if None in row or None in row.values() or empty:
            where = f"{path}, line {reader.line_num}"
            raise ConfigError(f"{where}: {len(header)} values are needed, path and label not empty")
        label = row[column].strip()
        if column == "labels":
            label = tuple(text.strip() for text in label.split(";") if text.strip())
        yield reader.line_num, row[file], label, row.get("split", "")


def _json_rows(path) -> Iterator[tuple[int, str, str | tuple[str, ...], str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            file = next((row[name] for name in _FILE if name in row), None)
            label = json_label(row)
        except (ValueError, AttributeError, TypeError) as error:
            raise ConfigError(f"{path}, line {number}: this is no JSON object: {error}") from None
        if not file or label is None:
            raise ConfigError(f"{path}, line {number}: path and label are needed")
        yield number, str(file), label, str(row.get("split", ""))


def json_label(fields: dict) -> str | tuple[str, ...] | None:
    """The label in a JSON object as text: its field `label`, `labels`, `class` or `cls`, if any."""
    value = next((fields[name] for name in _LABEL if name in fields), None)
    if isinstance(value, list):
        return tuple(str(one).strip() for one in value)
    return None if value is None else str(value).strip()
