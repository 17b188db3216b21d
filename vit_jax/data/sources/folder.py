"""Your own images as files: a folder of them, or (in `listed.py`) a list of files. Nothing but names
is read before an image is asked for, unless `config.data.examine` says so; see `examined.py`.

A folder holds, of these the first that fits:
1. images and no sub-folders: they have no labels;
2. train/ and test/ (or val/, or validation/), each with one sub-folder per class;
3. nothing but train/ and test/ (or …) that hold images and no sub-folders: they have no labels;
4. one sub-folder per class. Images beside the class folders belong to no class and are skipped.

In a class folder, images may be at any depth. Links to files and folders are followed, except links
to a folder that contains them; of a class, every folder is visited once, however many links lead to
it.
"""

import dataclasses
import itertools
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataAbsent, DataSet, Label, Record
from vit_jax.data.sources import examined, fingerprint
from vit_jax.data.sources.listed import read_list
from vit_jax.data.sources.ranges import read_files
from vit_jax.data.sources.stored_index import INDEX
from vit_jax.data.sources.table import SPLITS, SUFFIXES, Table, hold_out, label_at, natural
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.trees import Tree, tree_at
from vit_jax.data.sources.unused import Unused


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
    """

    root: str
    classes: tuple[str, ...]
    multi_label: bool
    paths: tuple[str, ...]
    labels: np.ndarray | tuple[tuple[int, ...], ...] | None
    contents: np.ndarray | None = None
    marks: np.ndarray | None = None
    problems: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
    table = _read_folder(tree, config_data, unused)
    unused.report(str(path))
    _report(table)

    def make(classes, multi_label, paths, labels):
        contents, findings = tree.contents(paths), _found(table, paths)
        return ImageFiles(str(path), classes, multi_label, paths, labels, contents, *findings)

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


def unread_files(root: epath.Path) -> list[tuple[str, str]]:
    """The files of a folder of images that are no examples: (name relative to `root`, why), without
    hidden ones.
    """
    tree, why = tree_at(root), "its name does not end like an image's"
    folders = tree.folders("")
    if not folders:
        return [(name, why) for name in tree.files("") if not _is_image(name) and name != INDEX]
    unread = [(name, "it lies beside the class folders") for name in _loose_images(tree, Unused())]
    for folder in folders:
        unread += [(name, why) for name in tree.files_below(folder) if not _is_image(name)]
    return sorted(unread, key=lambda entry: natural(entry[0]))


def _read_folder(tree: Tree, config_data: Data, unused: Unused) -> Table:
    where = str(tree.root)
    folders = tree.folders("")
    if not folders:
        images = _unlabelled(tree, "", unused)
        inspected = _examined(tree, images, config_data)
        members = hold_out(images, config_data, where, examined=inspected)
        return Table(where, (), False, members, inspected)
    loose = _loose_images(tree, unused)
    if loose:
        logging.warning(
            "%s: %d images lie beside the class folders and are skipped, the first is %s",
            where, len(loose), readable(loose[0]),
        )  # fmt: skip
    split_folders = [name for name in SPLITS if name in folders]
    labelled = _labelled_splits(tree)
    if not labelled and "train" in folders and len(split_folders) == len(folders):
        members = {name: _unlabelled(tree, name, unused) for name in split_folders}
        return Table(
            where,
            (),
            False,
            members,
            _examined(tree, itertools.chain(*members.values()), config_data),
        )
    names, members = (), {}
    for name in labelled:
        of_split, members[name] = _class_folders(tree, name, names, unused)
        names = names or of_split
    if not labelled:
        names, images = _class_folders(tree, "", (), unused)
        inspected = _examined(tree, images, config_data)
        members = hold_out(images, config_data, where, examined=inspected)
    else:
        inspected = _examined(tree, itertools.chain(*members.values()), config_data)
    if tree.links_back:
        logging.warning(
            "%s: %d links lead back to a folder that contains them and are not followed, the first is %s",
            where, len(tree.links_back), readable(min(tree.links_back, key=natural)),
        )  # fmt: skip
    return Table(where, tuple(map(readable, names)), False, members, inspected)


def _examined(
    tree: Tree, images: Iterable[tuple[str, Label]], config_data: Data
) -> examined.Examined | None:
    return examined.examine(str(tree.root), [path for path, _ in images], config_data)


def _labelled_splits(tree: Tree) -> list[str]:
    """The folders of splits that hold class folders; a class that happens to be called 'train'
    holds images.
    """
    return [name for name in SPLITS if tree.folders(name)]


def _loose_images(tree: Tree, unused: Unused) -> list[str]:
    """The images that are in no folder of a class, or of a split without labels, relative to the
    root, which has such folders.
    """
    # Where splits have class folders, one that has none is no split: its images have no labels.
    folders = ["", *SPLITS] if _labelled_splits(tree) else [""]
    return [
        os.path.join(folder, name)
        for folder in folders
        for name in tree.files(folder)
        if unused.is_image(name)
    ]


def _unlabelled(tree: Tree, folder: str, unused: Unused) -> list[tuple[str, Label]]:
    """(path from the root, None) of the images in a folder."""
    names = [name for name in tree.files(folder) if unused.is_image(name)]
    if not names:
        raise ConfigError(
            f"{tree.root / folder} has neither images ({', '.join(SUFFIXES)}) nor sub-folders, one for each class; it "
            f"has {unused.text() or 'no files'}"
        )
    return [(os.path.join(folder, name), None) for name in names]


def _class_folders(tree: Tree, folder: str, names: tuple[str, ...], unused: Unused):
    """The names of the class folders (those given, or the sub-folders), and (path from the root,
    label) of all images in them.
    """
    existing = tuple(tree.folders(folder))
    unknown = sorted(set(existing) - set(names)) if names else []
    if unknown:
        raise ConfigError(
            f"{tree.root / folder} has the class folder {unknown[0]!r}, which the training images lack"
        )
    images = []
    for label, name in enumerate(names or existing):
        there_is = tree.files_below(os.path.join(folder, name))
        files = [file for file in there_is if unused.is_image(file)]
        if not files and not names:
            raise ConfigError(
                f"{tree.root / folder / name} has no images ({', '.join(SUFFIXES)}); files that are not used: "
                f"{unused.text() or 'none'}"
            )
        images += [(file, label) for file in files]
    return names or existing, images


def _is_image(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in SUFFIXES
