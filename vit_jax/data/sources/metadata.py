"""Image folders of the Hugging Face hub, with metadata.csv, .jsonl or .parquet beside the images: lists with the fields
`file_name` and `label`, one for all images, or one in the folder of each split.
"""

import os
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.sources.listed import ListedImage, make_table, read_rows
from vit_jax.data.sources.parquet_index import class_names, import_parquet, label_texts
from vit_jax.data.sources.split_names import find_splits, has_both_sides
from vit_jax.data.sources.table import Table
from vit_jax.data.sources.trees import Tree
from vit_jax.data.sources.unused import Unused

if TYPE_CHECKING:
    import pyarrow

_PARQUET = "metadata.parquet"
_NAMES = ("metadata.csv", "metadata.jsonl", _PARQUET)
_FILE = "file_name"
_LABELS = ("label", "labels")
_KEYS = re.compile(r'"(\w+)"\s*:')  # of a JSON object
_UNLISTED = "images that the metadata does not list"


def find_metadata(tree: Tree) -> dict[str, epath.Path]:
    """The lists of labelled images in a folder: folder from the root → list; none if images are not described so."""
    lists = _lists_in(tree, [""])
    if not lists:
        splits = find_splits(tree.folders(""))
        lists = _lists_in(tree, list(splits))
        if len(lists) < len(splits):
            return {}
    return lists if all(map(_has_labels, lists.values())) else {}


def read_metadata(
    tree: Tree, lists: Mapping[str, epath.Path], config_data: Data, unused: Unused
) -> Table:
    """The images that lists in a folder describe.

    Args:
      lists: see `find_metadata`.
      unused: counts the files that are no examples.

    Raises:
      ConfigError: an image is not there, or as for `listed.make_table`.
    """
    where = str(tree.root)
    images: list[ListedImage] = []
    is_plural = False
    for folder, path in lists.items():
        rows, is_plural = _read_parquet(path) if path.name == _PARQUET else read_rows(path)
        for row in rows:
            file = os.path.normpath(os.path.join(folder, row.file))
            images.append(row._replace(file=file, split=folder or row.split))
    images = _with_splits_of_folders(images)
    present = set(filter(unused.is_image, tree.files_below("")))
    missing = [image for image in images if image.file not in present]
    if missing:
        first = missing[0]
        raise ConfigError(
            f"{first.where}, line {first.line}: {first.file!r} is no image in {where}; {len(missing):,} of "
            f"{len(images):,} files that are listed are not there"
        )
    unused.skip(_UNLISTED, present - {image.file for image in images})
    names = " and ".join(dict.fromkeys(path.name for path in lists.values()))
    return make_table(where, tree.root, images, is_plural, config_data, names, unused.reasons())


def _lists_in(tree: Tree, folders: Sequence[str]) -> dict[str, epath.Path]:
    lists = {}
    for folder in folders:
        names = tree.files(folder)
        name = next((name for name in _NAMES if name in names), None)
        if name is not None:
            lists[folder] = tree.root / folder / name
    return lists


def _has_labels(path: epath.Path) -> bool:
    """Whether a list names files and labels; others have captions or boxes."""
    if path.name == _PARQUET:
        names = _read_table(path).schema.names
        return _FILE in names and not set(_LABELS).isdisjoint(names)
    with path.open("rb") as file:
        first = file.readline().decode("utf-8-sig", "replace")
    fields = re.findall(r"\w+", first) if path.suffix == ".csv" else _KEYS.findall(first)
    return _FILE in fields and not set(_LABELS).isdisjoint(fields)


def _read_table(path: epath.Path) -> "pyarrow.Table":
    arrow = import_parquet(str(path))
    try:
        with path.open("rb") as file:
            return arrow.parquet.read_table(file)
    except (OSError, arrow.ArrowException) as error:
        raise ConfigError(f"{path} cannot be read as a Parquet file: {error}") from None


def _read_parquet(path: epath.Path) -> tuple[list[ListedImage], bool]:
    """As `listed.read_rows`, of a Parquet file."""
    table = _read_table(path)
    label = next(name for name in _LABELS if name in table.schema.names)
    names = class_names(table.schema, label)
    texts = label_texts(table.column(label), names, str(path))
    files = table.column(_FILE).to_pylist()
    images = []
    for row, (file, text) in enumerate(zip(files, texts, strict=True)):
        if not file:
            raise ConfigError(f"{path}, row {row}: {_FILE} is empty")
        images.append(ListedImage(path, row, file, text, ""))
    return images, label == "labels"


def _with_splits_of_folders(images: list[ListedImage]) -> list[ListedImage]:
    """The images with the splits of the folders that they lie in, if a list for all has none of its own."""
    if any(image.split for image in images):
        return images
    tops = [image.file.partition("/")[0] if "/" in image.file else "" for image in images]
    splits = find_splits(tops)
    if set(splits) != set(tops) or not has_both_sides(splits.values()):
        return images
    return [image._replace(split=top) for image, top in zip(images, tops, strict=True)]
