"""The features of images, written to a file as they come: `vit_jax predict --features`."""

import contextlib
import functools
import math
import pathlib
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.install import pip_install
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.prediction.features import (
    NativeLayer,
    Wanted,
    at_size,
    compile_features,
    compute_features,
)
from vit_jax.prediction.images import Named

_EVERY = 10.0  # seconds between two lines on how far it is
_BLOCK = 1 << 20  # bytes copied at a time


def file_to_write(out: str, flag: str = "--out") -> epath.Path:
    """The file for features; call it before the model is loaded.

    Args:
      out: FILE.npz or FILE.parquet.
      flag: that names the file, for messages.

    Raises:
      ConfigError: it cannot be written, or has another ending.
    """
    target = outputs.file_to_write(out, flag)
    if target.suffix not in _WRITERS:
        raise ConfigError(f"{flag}={out}: name it .npz or .parquet")
    return target


def write_features(
    run: TrainedModel,
    files: Iterable[Named],
    target: epath.Path,
    *,
    batch_size: int,
    wanted: Wanted | None = None,
) -> dict[str, Any]:
    """Writes the features of images and their names, in the order in which they are found.

    The memory it takes does not grow with the number of images. The file appears when it is whole.

    Args:
      run: from `loading.load_run`.
      files: images, see `images.find_images`.
      target: from `file_to_write`. FILE.npz has `files` (n,), `features` (n, D) float32 and of each layer
        `LAYER.class_token` (n, D), where there is one, and `LAYER.map` (n, h, w, D) or `LAYER.patches` (n, N, D), or
        `LAYER.tokens` without a grid; of images at sizes of their own `grids` (n, 2), the rows and columns of their
        patches, of which further ones are zero, or maps one by one, `LAYER.map.0` (h, w, D) and so on; FILE.parquet
        has a column for each, and a row for each image.
      wanted: which features; by default the input of the head alone.

    Returns:
      The numbers of `images` written, of those that are `unreadable`, and the `width` of the features; with layers
      also the shapes of their `arrays` in the file.

    Raises:
      ConfigError: there are no such features; raised before any image is read.
      UserError: no image can be read.
    """
    wanted = wanted or Wanted()
    run = at_size(run, wanted)
    compiled = compile_features(run, wanted)
    if wanted.maps and compiled.native and target.suffix == ".parquet":
        raise ConfigError(
            "maps of images at sizes of their own have several shapes, which a column cannot have: name the file .npz; "
            "or pass --layers without --maps, for patches and `grids`, their rows and columns"
        )
    batches = compute_features(run, files, batch_size, compiled)
    good, bad, began = 0, 0, time.monotonic()
    logged_at = began
    with outputs.writing(target) as partial:
        with _WRITERS[target.suffix](partial) as writer:
            for names, (pooled, layers), unread in batches:
                for error in unread:
                    logging.error("%s", error)
                arrays = {"features": pooled} | _arrays(layers, wanted.maps)
                if names:
                    writer.add(names, arrays)
                good, bad = good + len(names), bad + len(unread)
                if time.monotonic() - logged_at >= _EVERY:
                    logged_at = time.monotonic()
                    logging.info("%d images, %.0f a second", good, good / (logged_at - began))
        if not good:
            raise UserError(f"none of the {bad} images can be read, see above")
    result = {"images": good, "unreadable": bad, "width": arrays["features"].shape[-1]}
    shapes = {
        name: [good, "h", "w", array[0].shape[-1]]
        if isinstance(array, list)
        else [good, *array.shape[1:]]
        for name, array in arrays.items()
    }
    return result | ({"arrays": shapes} if wanted.layers else {})


def _arrays(
    layers: Sequence[LayerFeatures], maps: bool
) -> dict[str, np.ndarray | list[np.ndarray]]:
    """The arrays of a file by name, see `write_features`; a list where images have several shapes."""
    arrays = {}
    for layer in layers:
        name = layer.name.replace("/", ".")
        if layer.has_class_token:
            arrays[f"{name}.class_token"] = layer.class_token
        if isinstance(layer, NativeLayer):
            arrays["grids"] = layer.grids
        if layer.grid is None:
            arrays[f"{name}.tokens"] = layer.tokens
        elif maps:
            arrays[f"{name}.map"] = layer.map
        else:
            arrays[f"{name}.patches"] = layer.patches
    return arrays


class _Npz:
    """Arrays and names in temporary files beside the archive until their number is known."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._open = contextlib.ExitStack()
        self._scratch = functools.partial(tempfile.TemporaryFile, dir=path.parent)
        self._names, self._longest = self._open.enter_context(self._scratch()), 1
        self._arrays: dict[
            str, tuple[Any, tuple[int, ...], str]
        ] = {}  # file, shape of an image's, type
        self._shapes: dict[
            str, list[tuple[int, ...]]
        ] = {}  # of each image, where there are several
        self._count = 0

    def __enter__(self) -> "_Npz":
        return self

    def add(self, names: list[str], arrays: dict[str, np.ndarray | list[np.ndarray]]) -> None:
        for name, array in arrays.items():
            if isinstance(array, list):
                self._shapes.setdefault(name, []).extend(x.shape for x in array)
                array = np.concatenate([x.ravel() for x in array])
            if name not in self._arrays:
                kind = "<i4" if np.issubdtype(array.dtype, np.integer) else "<f4"
                file = self._open.enter_context(self._scratch())
                self._arrays[name] = file, array.shape[1:], kind
            file, _, kind = self._arrays[name]
            file.write(np.ascontiguousarray(array, kind))
        self._names.writelines(f"{name}\0".encode("utf-8", "surrogateescape") for name in names)
        self._count += len(names)
        self._longest = max(self._longest, *map(len, names))

    def __exit__(self, kind, *_) -> None:
        with self._open:
            if kind is None:
                self._write()

    def _write(self) -> None:
        width = f"<U{self._longest}"
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED) as archive:
            for name, (file, shape, kind) in self._arrays.items():
                file.seek(0)
                for number, own in enumerate(self._shapes.get(name, ())):
                    with _entry(archive, f"{name}.{number}", kind, own) as entry:
                        entry.write(file.read(np.dtype(kind).itemsize * math.prod(own)))
                if name in self._shapes:
                    continue
                with _entry(archive, name, kind, (self._count, *shape)) as entry:
                    shutil.copyfileobj(file, entry, _BLOCK)
            with _entry(archive, "files", width, (self._count,)) as entry:
                for file_name in self._read_names():
                    entry.write(np.array(file_name, width).tobytes())

    def _read_names(self) -> Iterator[str]:
        self._names.seek(0)
        rest = b""
        while block := self._names.read(_BLOCK):
            *whole, rest = (rest + block).split(b"\0")
            yield from (name.decode("utf-8", "surrogateescape") for name in whole)


@contextlib.contextmanager
def _entry(archive: zipfile.ZipFile, name: str, descr: str, shape: tuple) -> Iterator[Any]:
    """An array in the archive, its numbers to be written."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(entry, header)
        yield entry


class _Parquet:
    """A row group for each batch; what has several dimensions is flattened, row by row of the image."""

    def __init__(self, path: pathlib.Path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                f"a .parquet file needs pyarrow: {pip_install('parquet')}, or name the file .npz"
            ) from error
        self._arrow, self._path, self._writer = pyarrow, path, None

    def __enter__(self) -> "_Parquet":
        return self

    def add(self, names: list[str], arrays: dict[str, np.ndarray]) -> None:
        arrow, columns = self._arrow, {"file": names}
        for name, array in arrays.items():
            flat = arrow.array(array.ravel())
            columns[name] = arrow.FixedSizeListArray.from_arrays(flat, array[0].size)
        table = arrow.table(columns)
        if self._writer is None:
            self._writer = arrow.parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def __exit__(self, *_) -> None:
        if self._writer is not None:
            self._writer.close()


_WRITERS = {".npz": _Npz, ".parquet": _Parquet}
