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
from vit_jax.data.sources.ranges import Range, Ranges, open_to_scan
from vit_jax.data.sources.stored_index import scan_all

_HEADER, _FOOTER = 12, 4
_KIND = "tfrecord 1"


class TfRecords:
    """The records of `files`, in order, from `start` to `stop` of each; for any number of threads."""

    def __init__(self, files: Sequence[tuple[str, int, int]]):
        self._ranges, self._places = Ranges(), []
        found = scan_all([path for path, _, _ in files], scan, _KIND)
        for (path, start, stop), stored in zip(files, found, strict=True):
            sizes = np.frombuffer(stored, "<i8")
            first = np.cumsum(sizes + (_HEADER + _FOOTER)) - sizes - _FOOTER
            self._places.append((path, first[start:stop], sizes[start:stop]))
        self._ends = list(itertools.accumulate(len(first) for _, first, _ in self._places))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        return self._ranges.read(*self._place(index))

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Several records, those of buckets by requests at the same time."""
        return self._ranges.read_many([self._place(index) for index in indices])

    def _place(self, index: int) -> Range:
        number = bisect.bisect_right(self._ends, index)
        path, first, size = self._places[number]
        row = index - (self._ends[number] - len(first))
        return path, int(first[row]), int(size[row])


def scan(file: places.File) -> bytes:
    """The size of every record in a TFRecord file, 8 bytes each, little endian.

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
    return np.asarray(sizes, "<i8").tobytes()
