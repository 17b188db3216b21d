"""ArrayRecord files read at random, a record at a time: blocks would cost more, since all records
of a block are in memory before the first is used.
"""

import bisect
import errno
import functools
import itertools
import os
import threading
from collections.abc import Mapping, Sequence

from vit_jax.base import places
from vit_jax.data.record import DataError
from vit_jax.data.sources import riegeli
from vit_jax.data.sources.columns import FileColumns, Index, smallest
from vit_jax.data.sources.ranges import Ranges
from vit_jax.data.sources.readers import OPEN
from vit_jax.data.sources.stored_index import Kind, find_records

_FIRST, _RECORD = "first", "record"  # columns: see `riegeli.Chunks`


class ArrayRecords:
    """The records of `files`, in order, from `start` to `stop` of each; for any number of threads. On disks of this
    machine by ArrayRecord's own reader, elsewhere by ranges, see `riegeli`.

    Args:
      files: (path, start, stop) each.
      examples: path → how many records are in the whole file.
      sizes: path → its bytes, where that is known.
    """

    def __init__(
        self,
        files: Sequence[tuple[str, int, int]],
        examples: Mapping[str, int],
        sizes: Mapping[str, int] | None = None,
    ):
        self._files, self._examples, self._sizes = tuple(files), examples, sizes or {}
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in self._files))
        self._ranges, self._owner = Ranges(), object()
        self._counted: set[str] = set()  # local files that were found to have all their records
        self._cached_index: Index | None = None
        self._finding = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Several records, those of buckets by requests at the same time.

        Raises:
          DataError: a file is missing, damaged or has changed.
          RuntimeError, ValueError: a record is damaged.
          OSError: a disk fails (EIO), or there are no descriptors.
        """
        wanted = [self.place(index) for index in indices]
        if not wanted or not needs_index(wanted[0][0]):
            return [self._read_local(path, row) for path, row in wanted]
        parts = [(path, *self._chunks(path).find(row)) for path, row in wanted]
        try:
            stored = self._ranges.read_many([(path, first, size) for path, first, size, _ in parts])
        except FileNotFoundError as error:
            raise self._missing(error.filename) from None
        return [
            riegeli.decode_chunk(content, first)[number]
            for content, (_, first, _, number) in zip(stored, parts, strict=True)
        ]

    def place(self, index: int) -> tuple[str, int]:
        """The file that holds record `index`, and its number in there."""
        number = bisect.bisect_right(self._ends, index)
        path, _, stop = self._files[number]
        return path, stop - self._ends[number] + index

    def _read_local(self, path: str, row: int) -> bytes:
        try:
            reader = OPEN.get(self._owner, path)
        except FileNotFoundError:
            raise self._missing(path) from None
        if path not in self._counted:
            self._check_count(path, reader.num_records())
            self._counted.add(path)
        try:
            return reader.read([row])[0]
        except RuntimeError as error:
            if os.strerror(errno.EIO) in str(error):  # of the disk, not of what is on it
                raise OSError(errno.EIO, os.strerror(errno.EIO), path) from error
            raise

    def _missing(self, path: str) -> DataError:
        return DataError(f"{path} is missing, there should be {self._examples[path]} records")

    def _chunks(self, path: str) -> riegeli.Chunks:
        """The chunks of a file that is read by ranges."""
        index = self._index()
        number = index.number(path)
        return riegeli.Chunks(index.column(_FIRST, number), index.column(_RECORD, number))

    def _index(self) -> Index:
        """Where the records are of files that are read by ranges; found when the first is read."""
        if self._cached_index is None:
            with self._finding:
                if self._cached_index is None:
                    paths = [path for path, _, _ in self._files]
                    index = find_records(paths, KIND, self._sizes)
                    for path in paths:
                        self._check_count(path, count_records(index, path))
                    self._cached_index = index
        return self._cached_index

    def _check_count(self, path: str, count: int) -> None:
        if count != self._examples[path]:
            raise DataError(
                f"{path} is damaged: {count} records, there should be {self._examples[path]}"
            )


@functools.cache
def _is_remote(folder: str) -> bool:
    return places.is_remote(folder)


def needs_index(path: str) -> bool:
    """Whether a file is read by ranges: ArrayRecord's own reader cannot read buckets, and reads a file's table of
    records each time that it opens one, which on mounts takes longer than reading a record.
    """
    return _is_remote(os.path.dirname(path) or ".")


def count_records(index: Index, path: str) -> int:
    """How many records a file has."""
    number = index.number(path)
    return len(riegeli.Chunks(index.column(_FIRST, number), index.column(_RECORD, number)))


def _scan(file: places.File) -> FileColumns:
    """Where the records of a file are."""
    ranges = Ranges()
    try:
        chunks = riegeli.read_chunks(lambda *part: ranges.read(file.path, *part), file.size)
    except DataError:
        raise
    except ValueError as error:
        raise DataError(f"{file.path} is damaged: {error}") from None
    return FileColumns({_FIRST: smallest(chunks.places), _RECORD: smallest(chunks.records)})


KIND = Kind("arrayrecord 1", _scan)
