"""Your own images as files: a folder of class folders, or (in `listed.py`) a list of files. Nothing
but names is read before an image is asked for.

A folder holds either train/ and test/ (or val/, or validation/), each with one sub-folder per
class, or the class sub-folders alone.
"""

import dataclasses
import os
import pathlib

import numpy as np
from etils import epath

from vit_jax.base import paths
from vit_jax.base.errors import ConfigError
from vit_jax.data.record import BadImage, DataSet, Record
from vit_jax.data.sources.listed import read_list
from vit_jax.data.sources.table import HELD_OUT, SUFFIXES, Table, hold_out, label_at, natural


@dataclasses.dataclass(frozen=True)
class ImageFiles:
    """Image files with their labels.

    Attributes:
      root: the folder that `paths` are relative to; local, or gs://.
      paths: of the files, in the order of the indices.
      labels: (n,) int32; of a multi-label source a tuple of classes for each.
    """

    root: str
    classes: tuple[str, ...]
    multi_label: bool
    paths: tuple[str, ...]
    labels: np.ndarray | tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> Record:
        path = os.path.join(self.root, self.paths[index])
        try:
            with paths.open_bytes(path) as file:
                return Record(file.read(), label_at(self.labels, index), path)
        except FileNotFoundError:
            raise BadImage(path, "there is no such file") from None
        except OSError as error:
            raise BadImage(path, error.strerror or str(error)) from None


def open_folder(config_data) -> DataSet:
    """The folder of class folders, or the list of files, at `config_data.path`.

    Without splits of its own, the share `config_data.holdout` becomes 'test', the rest 'train'. On
    which side an image falls depends on its relative path alone, so new images move no old one.
    """
    if not config_data.path:
        raise ConfigError(
            "config.data.path is empty: 'folder' needs a folder of class folders, or a list of files: "
            "CSV or JSON lines"
        )
    path = epath.Path(config_data.path).expanduser()
    if not path.exists():
        raise ConfigError(f"config.data.path = {str(path)!r} does not exist")
    if (path / "dataset.json").exists():
        raise ConfigError(
            f"{path} was made by 'vit_jax prepare': read it with config.data.name='prepared'"
        )
    if path.is_dir() and paths.in_bucket(path):
        raise ConfigError(
            f"{path}: class folders are read from local disks; list them in a CSV file"
        )
    if path.is_dir():
        table, root = _read_folder(pathlib.Path(path), config_data.holdout), path
    else:
        table, root = read_list(path, config_data.holdout), path.parent
    return table.data_set(lambda *columns: ImageFiles(str(root), *columns))


def other_files(root: pathlib.Path) -> list[str]:
    """The files of a folder of class folders that no one reads, since their names do not end like
    an image's; relative to `root`, without hidden ones.
    """
    found = []
    for folder in map(root.joinpath, _subfolders(root)):
        found += [
            file.relative_to(root).as_posix() for file in _files(folder) if not _is_image(file)
        ]
    return sorted(found, key=natural)


def _read_folder(root: pathlib.Path, holdout: float) -> Table:
    # A split's folder has class folders in it; a class that happens to be called 'train' has
    # images.
    found = [name for name in ("train", *HELD_OUT) if _subfolders(root / name)]
    if not found:
        classes, images = _class_folders(root, root, ())
        return Table(str(root), classes, False, hold_out(images, holdout))
    classes, members = (), {}
    for name in found:
        names, members[name] = _class_folders(root / name, root, classes)
        classes = classes or names
    return Table(str(root), classes, False, members)


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
        files = [file for file in _files(folder / name) if _is_image(file)]
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
    return sorted(names, key=natural)


def _files(folder: pathlib.Path) -> list[pathlib.Path]:
    """The files in `folder` and below, but hidden ones."""
    found = []
    for where, _, names in os.walk(folder, followlinks=True):
        found += [os.path.join(where, name) for name in names if name[0] != "."]
    return [pathlib.Path(path) for path in sorted(found, key=natural)]


def _is_image(file: pathlib.Path) -> bool:
    return file.suffix.lower() in SUFFIXES
