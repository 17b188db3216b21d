"""Features of images in the files of a folder as they come, of any number, until they become one file. Started again,
the same command finds them there and continues.
"""

import contextlib
import itertools
import math
import os
import pathlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, BinaryIO

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.prediction.images import Named
from vit_jax.prediction.json_lines import JsonLines, checksum_of, content_mark

Arrays = dict[str, np.ndarray | list[np.ndarray]]  # a list where images have several shapes
_PROGRESS = "progress.jsonl"
_NAMES = "names"
_BLOCK = 1 << 20  # bytes read at a time


class FeatureStore:
    """Arrays and names of images, batch by batch: `with store:` to add some.

    Attributes:
      batches: a row for each batch: a mark of its `files`, how many `images` could be read, how many were `unreadable`,
        the `ends` of the stored files, the `arrays`, and the `shapes` of images in arrays with several shapes.
      arrays: by name the type and the shape of an image's numbers; of several shapes the last axis.
    """

    def __init__(self, folder: pathlib.Path, made_by: dict[str, Any]):
        """Reads what is there; nothing is written.

        Args:
          made_by: the weights and settings of the model; the features in the folder must have the same.

        Raises:
          ConfigError: they are not.
        """
        self._folder = folder
        self._cure = f"remove {folder} to start from the beginning, or name another file"
        self._lines = JsonLines(epath.Path(folder / _PROGRESS), made_by, self._cure)
        self._files: dict[str, BinaryIO] = {}
        self._stack = contextlib.ExitStack()
        whole = itertools.takewhile(self._is_stored, self._lines.rows)
        self._keep(sum(1 for _ in whole))

    @property
    def shapes(self) -> set[str]:
        """The names of arrays in which images have several shapes."""
        return {name for row in self.batches for name in row["shapes"]}

    @property
    def images(self) -> int:
        return sum(row["images"] for row in self.batches)

    @property
    def unreadable(self) -> int:
        return sum(row["unreadable"] for row in self.batches)

    def remaining(self, files: Iterable[Named]) -> Iterator[Named]:
        """The images that come after the stored ones. If a stored image has changed, its batch and all later ones are
        dropped.

        Raises:
          ConfigError: the first ones have changed already.
        """
        files = iter(files)
        for number, row in enumerate(self.batches):
            some = list(itertools.islice(files, row["images"] + row["unreadable"]))
            if marked(some) != row["files"]:
                if not number:
                    raise ConfigError(f"{self._folder} has features of other images: {self._cure}")
                self._keep(number)
                logging.warning(
                    "images have changed: all but the first %d are computed", self.images
                )
                return itertools.chain(some, files)
        return files

    def __enter__(self) -> "FeatureStore":
        self._lines.__enter__()
        ends = self.batches[-1]["ends"] if self.batches else {}
        for name, end in ends.items():
            file = self._open(name, "r+b")
            file.truncate(end)
            file.seek(end)
        return self

    def __exit__(self, *error) -> None:
        self._stack.close()
        self._files.clear()
        self._lines.__exit__(*error)

    def add(self, names: Sequence[str], arrays: Arrays, unreadable: int, files: str) -> None:
        """Adds a batch.

        Args:
          names: of the images that could be read.
          arrays: of these.
          unreadable: how many could not.
          files: `marked` of all.
        """
        shapes = {}
        for name, array in arrays.items() if names else ():
            own = array[0].shape
            if isinstance(array, list):
                shapes[name] = [x.shape for x in array]
                own = own[-1:]
                array = np.concatenate([x.ravel() for x in array])
            kind = "<i4" if np.issubdtype(array.dtype, np.integer) else "<f4"
            self.arrays.setdefault(name, (kind, own))
            self._append(f"{name}.bin", np.ascontiguousarray(array, kind).tobytes())
        self._append(_NAMES, "".join(f"{name}\0" for name in names).encode())
        row = {
            "files": files,
            "images": len(names),
            "unreadable": unreadable,
            "ends": {name: file.tell() for name, file in self._files.items()},
            "arrays": self.arrays,
            "shapes": shapes,
        }
        self._lines.add([row])
        self.batches.append(row)

    def open_array(self, name: str) -> BinaryIO:
        """The file of an array's numbers, from its beginning."""
        return open(self._folder / f"{name}.bin", "rb")

    def read(self, file: BinaryIO, name: str, shape: Sequence[int]) -> np.ndarray:
        """The next numbers of an array."""
        kind = np.dtype(self.arrays[name][0])
        return np.frombuffer(file.read(kind.itemsize * math.prod(shape)), kind).reshape(shape)

    def names(self) -> Iterator[str]:
        """Of all images."""
        rest = b""
        with open(self._folder / _NAMES, "rb") as file:
            while block := file.read(_BLOCK):
                *whole, rest = (rest + block).split(b"\0")
                yield from (name.decode() for name in whole)

    def _open(self, name: str, mode: str) -> BinaryIO:
        file = self._stack.enter_context((self._folder / name).open(mode, buffering=0))
        self._files[name] = file
        return file

    def _append(self, name: str, content: bytes) -> None:
        if name not in self._files:
            self._open(name, "wb")
        rest = memoryview(content)
        while rest:
            rest = rest[self._files[name].write(rest) :]

    def _is_stored(self, row: dict[str, Any]) -> bool:
        """Whether the files are as long as after a batch, which a machine that loses its power may leave shorter."""
        paths = {self._folder / name: end for name, end in row["ends"].items()}
        return all(path.exists() and os.path.getsize(path) >= end for path, end in paths.items())

    def _keep(self, count: int) -> None:
        """Keeps the first batches alone."""
        self._lines.keep(count)
        self.batches = list(self._lines.rows)
        self.arrays = dict(self.batches[-1]["arrays"]) if self.batches else {}


def is_store(folder: epath.Path) -> bool:
    """Whether a folder is a store, or has nothing but hidden files."""
    names = [name for name in os.listdir(folder) if not name.startswith(".")]
    return not names or _PROGRESS in names


def marked(files: Iterable[Named]) -> str:
    """A text that differs for other images, and where one was changed since."""
    return checksum_of([(file.name, content_mark(file)) for file in files])
