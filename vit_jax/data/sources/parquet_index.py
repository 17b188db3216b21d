"""The stored index of Parquet files that are data sets of images on the Hugging Face hub: places of images, and labels.

A file has a column of structs of `bytes` and `path` (or of bytes alone), and one of labels. The names of the classes
stand in the schema's metadata.

The columns of a file: of each row the page that has its image, the image's first byte and its bytes, and a code, the
row of the table that is its label as text; of each page its first byte, its bytes and its bytes without compression,
see `parquet_pages.Values`. The note: the names of both columns and of the classes, and the compression.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.install import pip_install
from vit_jax.data.sources.columns import FileColumns, smallest
from vit_jax.data.sources.label_texts import LabelText
from vit_jax.data.sources.parquet_pages import UnknownEncoding, Values, add_values
from vit_jax.data.sources.ranges import open_to_scan
from vit_jax.data.sources.split_names import are_splits, find_splits
from vit_jax.data.sources.stored_index import Kind

if TYPE_CHECKING:
    from types import ModuleType

    import pyarrow
    import pyarrow.parquet

_LABELS = ("label", "labels")
_IMAGES = ("image", "img")
_NO_LABEL = -1  # the hub's label of images to test on, if the labels are secret


def _scan(file: places.File) -> FileColumns:
    """The columns of a Parquet file.

    Raises:
      ConfigError: pyarrow is not installed, the file is damaged, has no column of images, no one column of labels, or
        pages that are not read.
    """
    arrow = import_parquet(file.path)
    try:
        with open_to_scan(file) as opened:
            return _describe(file.path, opened, arrow.parquet.ParquetFile(opened))
    except ConfigError:
        raise
    except UnknownEncoding as error:
        raise ConfigError(
            f"{file.path}: the images are {error}, which is not read: write the file again with pyarrow.parquet."
            "write_table(pyarrow.parquet.read_table(FILE), NEW_FILE)"
        ) from None
    except (
        OSError,
        arrow.ArrowException,
        ValueError,
        KeyError,
        IndexError,
        struct.error,
    ) as error:
        raise ConfigError(f"{file.path} cannot be read as a Parquet file: {error!r}") from None


def import_parquet(path: str) -> "ModuleType":
    """The package pyarrow, with `pyarrow.parquet`.

    Raises:
      ConfigError: it is not installed, and the file `path` needs it.
    """
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(f"{path} needs pyarrow: {pip_install('parquet')}") from error
    return pyarrow


def _describe(path: str, opened: BinaryIO, file: "pyarrow.parquet.ParquetFile") -> FileColumns:
    schema = file.schema_arrow
    column = _image_column(schema, path)
    label = _label_column(schema, path)
    names = class_names(schema, label)
    _check_splits(file, path)
    leaves = [file.schema.column(i) for i in range(len(file.schema))]
    number = [leaf.path for leaf in leaves].index(_leaf_path(schema, column))
    values = Values()
    table: dict[LabelText, int] = {}
    codes: list[int] = []
    for group in range(file.num_row_groups):
        chunk = file.metadata.row_group(group).column(number)
        add_values(opened, chunk, leaves[number].max_definition_level, values)
        texts = _read_labels(file, group, label, names, path)
        codes += [table.setdefault(text, len(table)) for text in texts]
    rows = np.asarray(values.places, np.int64).reshape(-1, 3).T
    pages = np.asarray(values.pages, np.int64).reshape(-1, 3).T
    columns = {
        "page": smallest(rows[0]),
        "first": smallest(rows[1]),
        "size": smallest(rows[2]),
        "page_first": smallest(pages[0]),
        "page_size": smallest(pages[1]),
        "page_inflated": smallest(pages[2]),
        "code": np.asarray(codes, "<u4"),
    }
    note = {"image": column, "label": label, "names": list(names), "codec": values.codec}
    return FileColumns(columns, list(table), note)


def _check_splits(file: "pyarrow.parquet.ParquetFile", path: str) -> None:
    """Raises `ConfigError` if a column names several splits: the name of a file says the split of all its rows."""
    import pyarrow.types

    if not file.num_row_groups:
        return
    texts = [field.name for field in file.schema_arrow if pyarrow.types.is_string(field.type)]
    for column in texts:
        first = file.read_row_group(0, columns=[column]).column(0).unique().to_pylist()
        if None in first or len(find_splits(first)) < len(first):
            continue
        values = set(file.read(columns=[column]).column(0).unique().to_pylist())
        if are_splits(values):
            raise ConfigError(
                f"{path} has rows of several splits, by the column {column!r}: {', '.join(sorted(values))}. Write a "
                "file for each, such as train.parquet and test.parquet"
            )


def _leaf_path(schema: "pyarrow.Schema", column: str) -> str:
    """The path of the values of a column of images in the file's own schema."""
    import pyarrow.types

    return f"{column}.bytes" if pyarrow.types.is_struct(schema.field(column).type) else column


def _read_labels(
    file: "pyarrow.parquet.ParquetFile", group: int, label: str, names: Sequence[str], path: str
) -> list[LabelText]:
    """The labels of a row group as text, `None` for each if there is no column of labels."""
    if not label:
        return [None] * file.metadata.row_group(group).num_rows
    return label_texts(file.read_row_group(group, columns=[label]).column(0), names, path)


def label_texts(column: "pyarrow.ChunkedArray", names: Sequence[str], path: str) -> list[LabelText]:
    """The labels in a column as text.

    Args:
      names: the classes that numbers stand for; (): labels are texts or numbers without names.
      path: the file, for errors.
    """
    import pyarrow.types

    kind = column.type
    kind = kind.value_type if pyarrow.types.is_list(kind) else kind
    if pyarrow.types.is_nested(kind):
        raise ConfigError(
            f"{path}: the labels are nested ({column.type}): write the name or number of the class, or a list of them"
        )
    texts = list(map(_text, column.to_pylist()))
    return [_named(text, names, path) for text in texts] if names else texts


def class_names(schema: "pyarrow.Schema", column: str) -> tuple[str, ...]:
    """The names of the classes in a column; () if the schema has none."""
    return _names_of(_features(schema).get(column, {}))


def _text(value: Any) -> LabelText:
    """A label as text, or several; `None` where there is none."""
    if value is None or value == _NO_LABEL:
        return None
    if isinstance(value, list):
        return tuple(map(str, value))
    return str(value)


def _named(text: LabelText, names: Sequence[str], path: str) -> LabelText:
    """The names of class numbers that the metadata knows."""
    if text is None:
        return None
    if isinstance(text, tuple):
        return tuple(_name_of(number, names, path) for number in text)
    return _name_of(text, names, path)


def _name_of(number: str, names: Sequence[str], path: str) -> str:
    if not number.isdecimal() or int(number) >= len(names):
        raise ConfigError(
            f"{path}: the label {number!r} is out of range: the schema names {len(names)} classes"
        )
    return names[int(number)]


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


def _label_column(schema: "pyarrow.Schema", where: str) -> str:
    """The name of the column with the labels; '' if there is none."""
    for name in _LABELS:
        if name in schema.names:
            return name
    named = [name for name in schema.names if class_names(schema, name)]
    if len(named) > 1:
        raise ConfigError(
            f"{where} has {len(named)} columns of classes ({', '.join(named)}) and none called label: rename the one "
            "that is meant"
        )
    return named[0] if named else ""


def _features(schema: "pyarrow.Schema") -> dict[str, Any]:
    """The hub's description of each column, by its name."""
    metadata = schema.metadata or {}
    noted = json.loads(metadata.get(b"huggingface", b"{}"))
    return noted.get("info", {}).get("features", {})


def _names_of(feature: Mapping[str, Any] | list) -> tuple[str, ...]:
    """The names of classes in a feature, or in the one that it is a list of; () if it has none."""
    if isinstance(feature, list):
        feature = feature[0] if feature else {}
    if feature.get("_type") == "ClassLabel":
        return tuple(feature.get("names", ()))
    inner = feature.get("feature")
    return _names_of(inner) if isinstance(inner, dict) else ()


KIND = Kind("parquet 1", _scan)
