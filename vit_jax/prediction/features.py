"""The features of images, written to a file as they come."""

import contextlib
import functools
import itertools
import pathlib
import shutil
import tempfile
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import outputs
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import reading
from vit_jax.data.record import BadImage
from vit_jax.evaluation.forward import data_of, make_forward
from vit_jax.models import registry
from vit_jax.prediction.images import Named, find, read_ahead
from vit_jax.prediction.overrides import load_for_images
from vit_jax.prediction.predict import padded

_EVERY = 10.0  # seconds between two lines on how far it is


def write_features(
    path: epath.PathLike,
    sources: Sequence[str],
    out: str,
    *,
    batch_size: int,
    settings: Sequence[tuple[str, str]] = (),
    said: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Writes the features of images and their names, in the order in which they are found.

    The memory it takes does not grow with the number of images. The file appears when it is whole.

    Args:
      path: of a run, or of a checkpoint of any format.
      sources: of images, see `images.find`.
      out: FILE.npz, with `features` (n, D) float32 and `files` (n,); or FILE.parquet, with a row `file`,
        `features` for each image.
      settings: of the run's config, see `overrides.of_images`.
      said: see `loading.load_run`.

    Returns:
      The numbers of `images` written, of those that are `unreadable`, and the `width` of the features.

    Raises:
      ConfigError: the file cannot be written, or there are no images; said before any work.
    """
    target = outputs.file_to_write(out, "--features")
    if target.suffix not in _WRITERS:
        raise ConfigError(f"--features={out}: name it .npz or .parquet")
    files = find(sources)
    run = load_for_images(path, settings, "predict", said)
    good, bad, width, began = 0, 0, 0, time.monotonic()
    logged_at = began
    with outputs.writing(target) as partial:
        with _WRITERS[target.suffix](partial) as writer:
            for names, rows, unread in features(run, files, batch_size):
                for error in unread:
                    logging.error("%s", error)
                if len(names):
                    writer.add(names, rows)
                good, bad, width = good + len(names), bad + len(unread), rows.shape[-1]
                if time.monotonic() - logged_at >= _EVERY:
                    logged_at = time.monotonic()
                    logging.info("%d images, %.0f a second", good, good / (logged_at - began))
        if not good:
            raise UserError(f"none of the {bad} images can be read, see above")
    return {"images": good, "unreadable": bad, "width": width}


def features(
    run: reading.Run, files: Iterable[Named], batch_size: int
) -> Iterator[tuple[list[str], np.ndarray, list[BadImage]]]:
    """Batch by batch the names of the images that can be read, their features (n, D) float32, and what is wrong with
    the others.
    """
    data = data_of(run)
    definition, weights = registry.split(run.model)
    forward = make_forward(definition, run.model_config, data)
    compiled = jax.jit(lambda w, images: forward(w, images).features.astype(jnp.float32))
    batches = read_ahead(files, data, batch_size)
    first = list(itertools.islice(batches, 1))
    for several in itertools.chain(first, batches):
        images, there = padded(several, len(first[0]), data)
        names = [file.name for file, image in several if not isinstance(image, BadImage)]
        bad = [image for _, image in several if isinstance(image, BadImage)]
        yield names, jax.device_get(compiled(weights, images))[there], bad


class _Npz:
    """Rows and names in temporary files beside the archive until their number is known."""

    def __init__(self, path: pathlib.Path):
        self._path = path
        self._files = contextlib.ExitStack()
        scratch = functools.partial(tempfile.TemporaryFile, dir=path.parent)
        self._rows, self._names = (self._files.enter_context(scratch()) for _ in range(2))
        self._shape, self._longest = (0, 0), 1

    def __enter__(self) -> "_Npz":
        return self

    def add(self, names: list[str], rows: np.ndarray) -> None:
        self._rows.write(np.ascontiguousarray(rows, "<f4"))
        self._names.writelines(f"{name}\0".encode("utf-8", "surrogateescape") for name in names)
        self._shape = (self._shape[0] + len(rows), rows.shape[1])
        self._longest = max(self._longest, *map(len, names))

    def __exit__(self, kind, *_) -> None:
        with self._files:
            if kind is None:
                self._write()

    def _write(self) -> None:
        width = f"<U{self._longest}"
        with zipfile.ZipFile(self._path, "w", zipfile.ZIP_STORED) as archive:
            for name, descr, shape in (
                ("features", "<f4", self._shape),
                ("files", width, self._shape[:1]),
            ):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                    header = {"descr": descr, "fortran_order": False, "shape": shape}
                    np.lib.format.write_array_header_1_0(entry, header)
                    if name == "features":
                        self._rows.seek(0)
                        shutil.copyfileobj(self._rows, entry)
                    else:
                        for one in self._read_names():
                            entry.write(np.array(one, width).tobytes())

    def _read_names(self) -> Iterator[str]:
        self._names.seek(0)
        rest = b""
        while block := self._names.read(1 << 20):
            *whole, rest = (rest + block).split(b"\0")
            yield from (name.decode("utf-8", "surrogateescape") for name in whole)


class _Parquet:
    """A row group for each batch."""

    def __init__(self, path: pathlib.Path):
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise ConfigError(
                "a .parquet file needs pyarrow: pip install pyarrow, or name the file .npz"
            ) from error
        self._arrow, self._path, self._writer = pyarrow, path, None

    def __enter__(self) -> "_Parquet":
        return self

    def add(self, names: list[str], rows: np.ndarray) -> None:
        arrow = self._arrow
        vectors = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.ravel()), rows.shape[1])
        table = arrow.table({"file": names, "features": vectors})
        if self._writer is None:
            self._writer = arrow.parquet.ParquetWriter(self._path, table.schema)
        self._writer.write_table(table)

    def __exit__(self, *_) -> None:
        if self._writer is not None:
            self._writer.close()


_WRITERS = {".npz": _Npz, ".parquet": _Parquet}
