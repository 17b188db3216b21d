"""Your own images: a folder of class folders, or a CSV file. Nothing but names is read before an
image is asked for.

A folder holds either train/ and test/ (or val/, or validation/), each with one sub-folder per
class, or the class sub-folders alone. A CSV file has the columns `path` (relative to its folder)
and `label` (class numbers, or names), and if you like `split`. A file classes.txt beside it, one
name a line, fixes the classes; otherwise they are those that occur.
"""

import csv
import dataclasses
import hashlib
import os
import pathlib
import re

import numpy as np

from vit_jax.data import splits
from vit_jax.data.record import BadImage, Record
from vit_jax.schema import ConfigError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
_HELD_OUT = (
    "test",
    "val",
    "validation",
)  # what 'test' may be called in a folder, the first that is there


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Image files with their labels.

    Attributes:
      root: the folder that `paths` are relative to.
      paths: of the files, in the order of the indices.
      labels: (n,) int32.
    """

    root: str
    classes: tuple[str, ...]
    paths: tuple[str, ...]
    labels: np.ndarray
    multi_label: bool = False

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        path = os.path.join(self.root, self.paths[index])
        try:
            with open(path, "rb") as file:
                return Record(file.read(), int(self.labels[index]), path)
        except FileNotFoundError:
            raise BadImage(path, "there is no such file") from None


@dataclasses.dataclass
class _Table:
    """All images of a data set: its classes, and per split the (path, label) of its images."""

    root: pathlib.Path
    classes: tuple[str, ...]
    splits: dict[str, list[tuple[str, int]]]


def open_folder(config_data, split: str) -> ImageFiles:
    """Opens a folder of class folders or a CSV file at `config_data.path`.

    Without splits of its own, the share `config_data.holdout` becomes 'test', the rest 'train'. On
    which side an image falls depends on its relative path alone, so new images move no old one.
    """
    if not config_data.path:
        raise ConfigError(
            "config.data.path is empty: 'folder' needs a folder of class folders, or a CSV file"
        )
    path = pathlib.Path(config_data.path).expanduser()
    if path.is_file():
        table = _read_csv(path, config_data.holdout)
    elif path.is_dir():
        table = _read_folder(path, config_data.holdout)
    else:
        raise ConfigError(f"config.data.path = {str(path)!r} does not exist")
    if len(table.classes) < 2:
        raise ConfigError(
            f"{path} has only one class, {table.classes[0]!r}: a classifier needs two or more"
        )
    sizes = {name: len(images) for name, images in table.splits.items()}
    parts = splits.select(split, sizes, str(path))
    images = [image for name, start, stop in parts for image in table.splits[name][start:stop]]
    paths, labels = zip(*images, strict=True)
    return ImageFiles(str(table.root), table.classes, paths, np.asarray(labels, np.int32))


def _read_folder(root: pathlib.Path, holdout: float) -> _Table:
    # A split's folder has class folders in it; a class that happens to be called 'train' has
    # images.
    found = [name for name in ("train", *_HELD_OUT) if _subfolders(root / name)]
    if not found:
        classes, images = _class_folders(root, root, ())
        return _Table(root, classes, _hold_out(images, holdout))
    classes, members = (), {}
    for name in found:
        names, members[name] = _class_folders(root / name, root, classes)
        classes = classes or names
    held_out = [name for name in found if name in _HELD_OUT]
    if held_out:
        members.setdefault("test", members[held_out[0]])
    return _Table(root, classes, members)


def _class_folders(folder: pathlib.Path, root: pathlib.Path, classes: tuple[str, ...]):
    """The classes (those given, or the sub-folders) and (path from the root, label) of all images
    in their folders.
    """
    names = tuple(_subfolders(folder))
    if not names:
        raise ConfigError(
            f"{folder} has no sub-folders: each class needs one, with its images in it"
        )
    unknown = sorted(set(names) - set(classes)) if classes else []
    if unknown:
        raise ConfigError(
            f"{folder} has the class folder {unknown[0]!r}, which the training images lack"
        )
    images = []
    for label, name in enumerate(classes or names):
        files = _image_files(folder / name)
        if not files and not classes:
            raise ConfigError(f"{folder / name} has no images ({', '.join(SUFFIXES)})")
        images += [(file.relative_to(root).as_posix(), label) for file in files]
    return classes or names, images


def _subfolders(folder: pathlib.Path) -> list[str]:
    if not folder.is_dir():
        return []
    with os.scandir(folder) as entries:
        names = [
            entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")
        ]
    return sorted(names, key=_natural)


def _image_files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The image files in `folder` and below."""
    found = []
    for where, _, names in os.walk(folder, followlinks=True):
        found += [
            os.path.join(where, name)
            for name in names
            if name.lower().endswith(SUFFIXES) and name[0] != "."
        ]
    return [pathlib.Path(path) for path in sorted(found, key=_natural)]


def _natural(name: str) -> tuple:
    """A sorting key by which 'class2' comes before 'class10'."""
    return tuple(
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ), name


def _hold_out(images: list[tuple[str, int]], share: float) -> dict[str, list[tuple[str, int]]]:
    members = {"train": [], "test": []}
    for path, label in images:
        digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
        held_out = int.from_bytes(digest, "big") < share * 2**64
        members["test" if held_out else "train"].append((path, label))
    return members


def _read_csv(path: pathlib.Path, holdout: float) -> _Table:
    rows = []
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file)
        header = reader.fieldnames or []
        if not {"path", "label"} <= set(header):
            raise ConfigError(
                f"{path} must begin with the column names path and label, not {','.join(header)!r}"
            )
        for row in reader:
            if None in row or None in row.values() or not row["path"] or not row["label"]:
                where = f"{path}, line {reader.line_num}"
                raise ConfigError(
                    f"{where}: {len(header)} values are needed, path and label not empty"
                )
            rows.append((reader.line_num, row))
    if not rows:
        raise ConfigError(f"{path} lists no images")
    classes, labels = _csv_labels(path, rows)
    images = [(row["path"], label) for (_, row), label in zip(rows, labels, strict=True)]
    if "split" not in header:
        return _Table(path.parent, classes, _hold_out(images, holdout))
    members = {}
    for (_, row), image in zip(rows, images, strict=True):
        members.setdefault(row["split"], []).append(image)
    return _Table(path.parent, classes, members)


def _csv_labels(
    path: pathlib.Path, rows: list[tuple[int, dict]]
) -> tuple[tuple[str, ...], list[int]]:
    """The classes, and the class of every row."""
    texts = [row["label"].strip() for _, row in rows]
    numbered = all(re.fullmatch(r"-?\d+", text) for text in texts)
    given = path.with_name("classes.txt")
    if given.is_file():
        classes = tuple(given.read_text(encoding="utf-8").split("\n"))
        classes = tuple(name.strip() for name in classes if name.strip())
    elif numbered:
        classes = tuple(str(label) for label in range(max(map(int, texts)) + 1))
    else:
        classes = tuple(sorted(set(texts), key=_natural))
    index = {name: label for label, name in enumerate(classes)}
    labels = []
    for (line, _), text in zip(rows, texts, strict=True):
        label = int(text) if numbered else index.get(text, -1)
        if not 0 <= label < len(classes):
            known = (
                f"there are {len(classes)} classes, 0 to {len(classes) - 1}"
                if numbered
                else f"see {given}"
            )
            raise ConfigError(f"{path}, line {line}: the label {text!r} is out of range: {known}")
        labels.append(label)
    return classes, labels
