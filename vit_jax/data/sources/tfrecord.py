"""TFRecord files read at random, without TensorFlow: one scan finds where the records are.

The format: the length of the record (8 bytes, little endian), a checksum of it (4), the record, a
checksum of that (4). The checksums are CRC-32C and not looked at: what is damaged is found by the
decoder.
"""

import bisect
import itertools
import struct
from collections.abc import Sequence

import numpy as np

from vit_jax.base import places
from vit_jax.data.record import DataError
from vit_jax.data.sources.columns import FileColumns, smallest
from vit_jax.data.sources.ranges import Range, Ranges, open_to_scan
from vit_jax.data.sources.stored_index import Kind, find_records

_HEADER, _FOOTER = 12, 4
_FIRST = "first"  # the column of the first bytes of records, and where the next one's would be


class TfRecords:
    """The records of `files`, in order, from `start` to `stop` of each; for any number of threads."""

    def __init__(self, files: Sequence[tuple[str, int, int]]):
        self._ranges, self._files = Ranges(), []
        self._index = find_records([path for path, _, _ in files], KIND) if files else None
        for path, start, stop in files:
            number = self._index.number(path)
            count = self._index.count(_FIRST, number) - 1
            self._files.append((path, number, start, min(stop, count)))
        sizes = (max(stop - start, 0) for _, _, start, stop in self._files)
        self._ends = list(itertools.accumulate(sizes))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        return self._ranges.read(*self._place(index))

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Several records, those of buckets by requests at the same time."""
        return self._ranges.read_many([self._place(index) for index in indices])

    def _place(self, index: int) -> Range:
        place = bisect.bisect_right(self._ends, index)
        path, number, _, stop = self._files[place]
        row = stop - self._ends[place] + index
        first, following = self._index.column(_FIRST, number)[row : row + 2].tolist()
        return path, first, following - first - _HEADER - _FOOTER


def scan(file: places.File) -> FileColumns:
    """Where the records of a TFRecord file are.

    Raises:
      DataError: the file ends within a record, or is no TFRecord file.
    """
    sizes, place, total = [], 0, file.size
    with open_to_scan(file) as opened:
        while place < total:
            opened.seek(place)
            header = opened.read(_HEADER)
            size = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else total
            if place + _HEADER + size + _FOOTER > total:
                raise DataError(
                    f"{file.path} is truncated, or no TFRecord file: record {len(sizes)}, at byte {place}, "
                    f"reaches beyond its {total} bytes"
                )
            sizes.append(size)
            place += _HEADER + size + _FOOTER
    return _columns(np.asarray(sizes, "<i8"))


def _columns(sizes: np.ndarray) -> FileColumns:
    """What is stored of a file whose records have these sizes."""
    first = np.cumsum([_HEADER, *(sizes + (_HEADER + _FOOTER))])
    return FileColumns({_FIRST: smallest(first)})


KIND = Kind("tfrecord 2", scan, {"tfrecord 1": lambda sizes: _columns(np.frombuffer(sizes, "<i8"))})
