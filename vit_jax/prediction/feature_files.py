"""The features of images, written to a file as they come: `vit_jax predict --features`."""

import collections
import contextlib
import itertools
import math
import os
import pathlib
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import lock, logs, outputs, places, stopping
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.install import pip_install
from vit_jax.checkpoints import fingerprints
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.models import registry
from vit_jax.models.layer_features import LayerFeatures
from vit_jax.prediction.feature_store import FeatureStore, is_store
from vit_jax.prediction.features import (
    NativeLayer,
    Wanted,
    at_size,
    compile_features,
    compute_features,
)
from vit_jax.prediction.images import Compiled, Named
from vit_jax.prediction.json_lines import checksum_of, content_mark
from vit_jax.prediction.output_names import check_not_checkpoint

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

    The memory it takes hardly grows with the number of images. The file appears when it is whole. Until then the
    features are in the folder FILE.unfinished beside it, where the same command finds them if it is started again. For
    a bucket such a command starts from the beginning.

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
      ConfigError: the target is the checkpoint, there are no such features, or the unfinished ones are of another
        model, other settings or other images; raised before any image is read.
      UserError: no image can be read.
      Locked: another process writes this file.
      Interrupted: SIGINT or SIGTERM came.
    """
    check_not_checkpoint(target, run.directory, "--out")
    wanted = wanted or Wanted()
    run = at_size(run, wanted)
    compiled = compile_features(run, wanted)
    if wanted.maps and compiled.native and target.suffix == ".parquet":
        raise ConfigError(
            "maps of images at sizes of their own have several shapes, which a column cannot have: name the file .npz; "
            "or pass --layers without --maps, for patches and `grids`, their rows and columns"
        )
    if target.suffix == ".parquet":
        _import_pyarrow()
    made_by = {
        "weights": fingerprints.digest(registry.split(run.model)[1]),
        "settings": checksum_of(wanted, compiled.data, compiled.native),
    }
    with _unfinished(target) as folder:
        store = FeatureStore(folder, made_by)

        def how_to_continue() -> str:
            return (
                f"stopped; the features of {store.images} images are kept in {folder}: start the same command again "
                "for the others"
            )

        # Features for a bucket are collected in a temporary folder, and no later command finds them.
        stays = not places.in_bucket(target)
        with stopping.keeping(how_to_continue) if stays else contextlib.nullcontext():
            remaining = store.remaining(files)
            with store:
                _fill(store, run, remaining, batch_size, compiled, wanted)
            if not store.images:
                shutil.rmtree(folder)
                raise UserError(f"none of the {store.unreadable} images can be read, see above")
            with outputs.writing(target) as partial:
                _WRITERS[target.suffix](store, partial)
        if stays:
            shutil.rmtree(folder)
    shapes = {
        name: [store.images, *(["h", "w", *shape] if name in store.shapes else shape)]
        for name, (_, shape) in store.arrays.items()
    }
    width = shapes["features"][-1]
    result = {"images": store.images, "unreadable": store.unreadable, "width": width}
    return result | ({"arrays": shapes} if wanted.layers else {})


def _fill(
    store: FeatureStore,
    run: TrainedModel,
    files: Iterable[Named],
    batch_size: int,
    compiled: Compiled,
    wanted: Wanted,
) -> None:
    """Adds the features of images to a store."""
    pulled = collections.deque()
    before = store.images
    began = logged_at = time.monotonic()
    if before:
        logging.info("the features of %d images are there", before)

    def noted() -> Iterator[Named]:
        for file in files:
            pulled.append((file.name, content_mark(file)))
            yield file

    rows = batch_size if before else 0  # as in the first batches, which had the same shape
    batches = compute_features(run, noted(), batch_size, compiled, rows=rows)
    for names, (pooled, layers), unread in batches:
        for error in unread:
            logging.error("%s", error)
        count = len(names) + len(unread)
        marks = [pulled.popleft() for _ in range(count)]
        arrays = {"features": pooled} | _arrays(layers, wanted.maps)
        printable = [logs.printable(name) for name in names]
        store.add(printable, arrays, len(unread), checksum_of(marks))
        if time.monotonic() - logged_at >= _EVERY:
            logged_at = time.monotonic()
            new = store.images - before
            logging.info("%d images, %.0f a second", store.images, new / (logged_at - began))


@contextlib.contextmanager
def _unfinished(target: epath.Path) -> Iterator[pathlib.Path]:
    """The folder of the features until their file is whole. One process at a time has it."""
    if places.in_bucket(target):
        with tempfile.TemporaryDirectory() as folder:
            yield pathlib.Path(folder)
        return
    folder = target.parent / f"{target.name}.unfinished"
    if folder.exists() and not is_store(folder):
        raise ConfigError(
            f"{folder} is needed until {target.name} is whole, and has other files: move them, or name another file"
        )
    outputs.make_folder(folder, "--out")
    busy = "another process writes features to {folder} ({holder}): wait until it has ended"
    with lock.Lock(folder, patience=0.0, busy=busy):
        try:
            yield pathlib.Path(folder)
        finally:
            if set(os.listdir(folder) if folder.exists() else ()) == {lock.NAME}:
                shutil.rmtree(folder)  # Nothing was computed.


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


def _write_npz(store: FeatureStore, path: pathlib.Path) -> None:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, (kind, shape) in store.arrays.items():
            with store.open_array(name) as file:
                if name not in store.shapes:
                    with _entry(archive, name, kind, (store.images, *shape)) as entry:
                        shutil.copyfileobj(file, entry, _BLOCK)
                    continue
                own_shapes = (own for row in store.batches for own in row["shapes"].get(name, ()))
                for number, own in enumerate(own_shapes):
                    with _entry(archive, f"{name}.{number}", kind, tuple(own)) as entry:
                        entry.write(store.read(file, name, own).tobytes())
        width = f"<U{max(1, *map(len, store.names()))}"
        with _entry(archive, "files", width, (store.images,)) as entry:
            for file_name in store.names():
                entry.write(np.array(file_name, width).tobytes())


@contextlib.contextmanager
def _entry(archive: zipfile.ZipFile, name: str, descr: str, shape: tuple) -> Iterator[Any]:
    """An array in the archive, its numbers to be written."""
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        header = {"descr": descr, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(entry, header)
        yield entry


def _write_parquet(store: FeatureStore, path: pathlib.Path) -> None:
    """A row group for each batch; what has several dimensions is flattened, row by row of the image."""
    arrow = _import_pyarrow()
    names = store.names()
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(store.open_array(name)) for name in store.arrays}
        writer = None
        for count in (row["images"] for row in store.batches if row["images"]):
            columns = {"file": list(itertools.islice(names, count))}
            for name, (_, shape) in store.arrays.items():
                flat = arrow.array(store.read(files[name], name, (count, *shape)).ravel())
                columns[name] = arrow.FixedSizeListArray.from_arrays(flat, math.prod(shape))
            table = arrow.table(columns)
            if writer is None:
                writer = stack.enter_context(arrow.parquet.ParquetWriter(path, table.schema))
            writer.write_table(table)


def _import_pyarrow() -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ConfigError(
            f"a .parquet file needs pyarrow: {pip_install('parquet')}, or name the file .npz"
        ) from error
    return pyarrow


_WRITERS = {".npz": _write_npz, ".parquet": _write_parquet}
