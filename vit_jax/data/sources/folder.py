"""Your own images as files: a folder of them, or (in `listed.py`) a list of files. Nothing but names
is read before an image is asked for, unless `config.data.examine` says so; see `examined.py`.

The meaning of folders is in `layouts.py`; `beside.py` finds files among images that are no examples.

In a class folder, images may be at any depth. Links to files and folders are followed, except links
to a folder that contains them; of a class, every folder is visited once, however many links lead to
it.
"""

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataAbsent, DataSet, Label, Record
from vit_jax.data.sources import examined, fingerprint, parquet, zip_index
from vit_jax.data.sources.beside import ARRAYS, MASKS, find_arrays, find_examples, find_masks
from vit_jax.data.sources.layouts import Layout, read_layout
from vit_jax.data.sources.listed import read_list
from vit_jax.data.sources.metadata import find_metadata, read_metadata
from vit_jax.data.sources.ranges import read_files
from vit_jax.data.sources.stored_index import INDEX
from vit_jax.data.sources.table import (
    SUFFIXES,
    Table,
    is_image_name,
    label_at,
    natural,
    with_held_out,
)
from vit_jax.data.sources.tar import open_tar
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.trees import Tree, tree_at
from vit_jax.data.sources.unused import BESIDE_CLASSES, HIDDEN, Unused


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Image files with their labels.

    Attributes:
      root: the folder that `paths` are relative to; local, or gs://.
      paths: of the files, in the order of the indices.
      labels: (n,) int32; of a multi-label source a tuple of classes for each; `None` without
        labels.
      contents: (n,) uint64, of a folder in a bucket: see `trees.Tree.contents`.
      marks: (n,) uint64, if the files were read: see `examined.Examined`; 0 where one cannot be read.
      problems: name → why the file cannot be read, as far as that is known.
      named_by_folders: whether classes are called as their folders.
    """

    root: str
    classes: tuple[str, ...]
    multi_label: bool
    paths: tuple[str, ...]
    labels: np.ndarray | tuple[tuple[int, ...], ...] | None
    contents: np.ndarray | None = None
    marks: np.ndarray | None = None
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)
    named_by_folders: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; all files are requested at once."""
        paths = [self._path(index) for index in indices]
        return [
            Record(_good(content), label_at(self.labels, index), readable(path))
            for path, index, content in zip(paths, indices, read_files(paths), strict=True)
        ]

    def identity(self, index: int) -> tuple[str, int] | None:
        """Name and content of a file, which differ once it was replaced; `None` if that is not known."""
        return None if self.contents is None else (self.paths[index], int(self.contents[index]))

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the names and, on a local disk, of the sizes; and of all
        labels. In a bucket, of all names and contents.
        """
        some = fingerprint.sampled(len(self))
        names = [self.paths[i] for i in some]
        sizes = [_size(self._path(i)) for i in some]
        labels = fingerprint.of_labels(self.labels)
        mark = fingerprint.digest(self.classes, len(self), names, sizes, labels)
        return fingerprint.with_contents(mark, self.paths, self.contents)

    def sketch(self) -> str:
        """The `fingerprint.sketch` of names, contents and classes, if the files were read; else ''."""
        if self.marks is None:
            return ""
        examples = zip(self.paths, self.marks.tolist(), strict=True)
        rows = ((*example, self._class_names(i)) for i, example in enumerate(examples))
        numbers = (fingerprint.number(repr(row)) for row in rows)
        return fingerprint.sketch(np.fromiter(numbers, np.uint64, len(self)))

    def _class_names(self, index: int) -> list[str]:
        label = label_at(self.labels, index)
        labels = label if isinstance(label, tuple) else () if label is None else (label,)
        return [self.classes[number] for number in labels]

    def _path(self, index: int) -> str:
        path = self.paths[index]
        if places.in_bucket(path):
            return path
        if places.in_bucket(self.root) and ("./" in path or "//" in path):  # names are not resolved
            scheme, _, root = self.root.partition("://")
            return f"{scheme}://{os.path.normpath(os.path.join(root, path))}"
        return os.path.join(self.root, path)


def _good(content: bytes | BadImage) -> bytes:
    """What was read of a file. Raises the error that came instead."""
    if isinstance(content, BadImage):
        raise content
    return content


def _size(path: str) -> int | None:
    """Bytes of a file; `None` if it is missing, or in a bucket, where asking takes too long."""
    if places.in_bucket(path) or not os.path.exists(path):
        return None
    return os.path.getsize(path)


def open_folder(config_data: Data) -> DataSet:
    """The folder of images, or the list of files, at `config_data.path`.

    Without splits of its own, the share `config_data.holdout` becomes 'test', the rest 'train'; see
    `table.hold_out`.
    """
    if not config_data.path:
        raise ConfigError(
            "config.data.path is empty: 'folder' needs a folder of images, or a list of files: CSV or "
            "JSON lines"
        )
    path = epath.Path(config_data.path).expanduser()
    if not path.exists():
        raise DataAbsent(
            f"config.data.path = {str(path)!r} does not exist{places.nearest_existing(path)}"
        )
    if (path / "dataset.json").exists():
        raise ConfigError(
            f"{path} was made by 'vit_jax prepare': read it with config.data.name='prepared'"
        )
    if path.suffix.lower() == zip_index.SUFFIX:
        return open_tar(config_data)
    if path.suffix.lower() == parquet.SUFFIX:
        return parquet.open_parquet([str(path)], str(path), config_data)
    if not path.is_dir():
        if path.suffix.lower() in SUFFIXES:
            raise ConfigError(
                f"config.data.path = {str(path)!r} is an image: set it to a folder of images, such as "
                f"{str(path.parent)!r}"
            )
        table = read_list(path, config_data)
        _report(table)
        return table.data_set(
            lambda *columns: ImageFiles(
                str(path.parent), *columns, None, *_found(table, columns[2])
            )
        )
    tree, unused = tree_at(path), Unused()
    if parquet_files := parquet.find_parquet(tree):
        paths = [os.path.join(path, name) for name in parquet_files]
        return parquet.open_parquet(paths, str(path), config_data)
    lists = find_metadata(tree)
    table = (
        read_metadata(tree, lists, config_data, unused)
        if lists
        else _read_folder(tree, config_data, unused)
    )
    unused.warn_of_pictures(str(path))
    _report(table)

    def make(classes, multi_label, paths, labels):
        contents, findings = tree.contents(paths), _found(table, paths)
        return ImageFiles(
            str(path),
            classes,
            multi_label,
            paths,
            labels,
            contents,
            *findings,
            named_by_folders=not lists,
        )

    return table.data_set(make)


def _report(table: Table) -> None:
    if table.examined:
        examined.report(table.where, table.examined, table.splits, table.classes)


def _found(table: Table, paths: Sequence[str]) -> tuple[np.ndarray | None, dict[str, str]]:
    """`ImageFiles.marks` and `problems` of files."""
    if not table.examined:
        return None, {}
    bad = table.examined.problems
    problems = {readable(path): bad[path] for path in paths if path in bad}
    return table.examined.marks_of(paths), problems


def unread_files(root: epath.Path, config_data: Data) -> list[tuple[str, str]]:
    """The files of a folder of images that are no examples: (name relative to `root`, why), without
    hidden ones.
    """
    tree, why = tree_at(root), "its name does not end like an image's"
    if parquet.find_parquet(tree):
        return []
    if find_metadata(tree):
        names = tree.files_below("")
        return [(name, why) for name in names if not is_image_name(name)]
    layout = read_layout(tree, config_data.layout)
    folders = tree.folders("")
    if not folders:
        return [(name, why) for name in tree.files("") if not is_image_name(name) and name != INDEX]
    loose = filter(is_image_name, layout.loose_files(tree))
    unread = [(name, "it lies beside the class folders") for name in loose]
    for folder in folders:
        unread += [(name, why) for name in tree.files_below(folder) if not is_image_name(name)]
    for of_split in layout.classes.values():
        for class_folders in of_split.values():
            files = [name for folder in class_folders for name in tree.files_below(folder)]
            images = list(filter(is_image_name, files))
            unread += [(name, f"it is {ARRAYS}") for name in find_arrays(images)]
            if config_data.mask_files == "skip":
                unread += [(name, f"it is {MASKS}") for name in find_masks(images)]
    return sorted(unread, key=lambda entry: natural(entry[0]))


def _read_folder(tree: Tree, config_data: Data, unused: Unused) -> Table:
    """The table of a folder of images."""
    where = str(tree.root)
    layout = read_layout(tree, config_data.layout)
    loose = [name for name in layout.loose_files(tree) if unused.is_image(name)]
    if loose:
        _warn_of_loose(where, len(loose), readable(loose[0]))
    unused.skip(BESIDE_CLASSES, loose)
    if layout.unlabelled:
        classes = ()
        members = {
            split: _unlabelled(tree, folder, unused) for split, folder in layout.unlabelled.items()
        }
    else:
        classes, members = _read_classes(tree, layout, config_data, unused)
    if tree.links_back:
        logging.warning(
            "%s: %d links lead back to a folder that contains them and are not followed, the first is %s",
            where, len(tree.links_back), readable(min(tree.links_back, key=natural)),
        )  # fmt: skip
    paths = [path for rows in members.values() for path, _ in rows]
    inspected = examined.examine(where, paths, config_data)
    members, is_held_out = with_held_out(members, config_data, where, examined=inspected)
    our_own = f".{INDEX}"
    hidden = [name for name in tree.hidden if not os.path.basename(name).startswith(our_own)]
    unused.skip(HIDDEN, hidden)
    return Table(
        where,
        tuple(map(readable, classes)),
        False,
        members,
        inspected,
        layout.spelled,
        is_held_out,
        "the names of folders",
        unused.reasons(),
    )


@functools.cache  # A run opens its data once to train and once to evaluate.
def _warn_of_loose(where: str, count: int, first: str) -> None:
    logging.warning(
        "%s: %d images lie beside the class folders and are skipped, the first is %s",
        where, count, first,
    )  # fmt: skip


def _unlabelled(tree: Tree, folder: str, unused: Unused) -> list[tuple[str, Label]]:
    """(path from the root, None) of the images in a folder."""
    names = [name for name in tree.files(folder) if unused.is_image(name)]
    if not names:
        raise ConfigError(
            f"{tree.root / folder} has neither images ({', '.join(SUFFIXES)}) nor sub-folders, one for each class; it "
            f"has {unused.text() or 'no files'}"
        )
    arrays = find_arrays(names)
    unused.skip(ARRAYS, arrays)
    images = [name for name in names if name not in arrays]
    return [(os.path.join(folder, name), None) for name in images]


def _read_classes(
    tree: Tree, layout: Layout, config_data: Data, unused: Unused
) -> tuple[tuple[str, ...], dict[str, list[tuple[str, Label]]]]:
    """The classes, which the first split defines, and for each split (path from the root, label) of all images. Where
    files are examined, folders without images are no classes, and reported.
    """
    classes: tuple[str, ...] = ()
    members = {}
    for split, class_folders in layout.classes.items():
        files_by_class = {}
        for name, folders in class_folders.items():
            files = [file for folder in folders for file in tree.files_below(folder)]
            images = [file for file in files if unused.is_image(file)]
            files_by_class[name] = find_examples(
                str(tree.root), images, config_data.mask_files, unused
            )
        if not classes:
            _drop_empty(tree, class_folders, files_by_class, unused, config_data)
            classes = tuple(files_by_class)
        number = {name: label for label, name in enumerate(classes)}
        members[split] = [
            (file, number[name])
            for name, files in files_by_class.items()
            if name in number
            for file in files
        ]
    return classes, members


def _drop_empty(
    tree: Tree,
    class_folders: Mapping[str, Sequence[str]],
    files_by_class: dict[str, list[str]],
    unused: Unused,
    config_data: Data,
) -> None:
    """Removes classes without images from `files_by_class`, if files are examined.

    Raises:
      ConfigError: all are empty, or one is and files are not examined.
    """
    empty = [name for name, files in files_by_class.items() if not files]
    if empty and (not config_data.examine or len(empty) == len(files_by_class)):
        raise ConfigError(
            f"{tree.root / class_folders[empty[0]][0]} has no images ({', '.join(SUFFIXES)}); files that are not used: "
            f"{unused.text() or 'none'}"
        )
    if not empty:
        return
    folder = os.path.dirname(class_folders[empty[0]][0])
    empty_names = list(map(readable, empty))
    examined.report_empty(str(tree.root / folder), empty_names)
    for name in empty:
        del files_by_class[name]
