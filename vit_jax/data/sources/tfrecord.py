"""TFRecord files read at random, without TensorFlow: one scan finds where the records are.

The format: the length of the record (8 bytes, little endian), a checksum of it (4), the record, a
checksum of that (4). The checksums are CRC-32C and not looked at: what is damaged is found by the
decoder.
"""

import bisect
import itertools
import os
import struct
from collections.abc import Sequence

import numpy as np

from vit_jax.data.record import DataError

_HEADER, _FOOTER = 12, 4


class TfRecords:
    """The records of `files`, in order, from `start` to `stop` of each."""

    def __init__(self, files: Sequence[tuple[str, int, int]]):
        self._places = []
        for path, start, stop in files:
            first, size = scan(path)
            self._places.append((path, first[start:stop], size[start:stop]))
        self._ends = list(itertools.accumulate(len(first) for _, first, _ in self._places))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        number = bisect.bisect_right(self._ends, index)
        path, first, size = self._places[number]
        row = index - (self._ends[number] - len(first))
        with open(path, "rb") as file:
            file.seek(first[row])
            return file.read(size[row])


def scan(path: str) -> tuple[np.ndarray, np.ndarray]:
    """First byte and size of every record in the TFRecord file `path`, (n,) int64 each.

    Raises:
      DataError: the file ends within a record, or is no TFRecord file.
    """
    first, sizes, place, total = [], [], 0, os.path.getsize(path)
    with open(path, "rb") as file:
        while place < total:
            file.seek(place)
            header = file.read(_HEADER)
            size = struct.unpack("<Q", header[:8])[0] if len(header) == _HEADER else total
            if place + _HEADER + size + _FOOTER > total:
                raise DataError(
                    f"{path} is truncated, or no TFRecord file: record {len(first)}, at byte {place}, "
                    f"reaches beyond its {total} bytes"
                )
            first.append(place + _HEADER)
            sizes.append(size)
            place += _HEADER + size + _FOOTER
    return np.asarray(first, np.int64), np.asarray(sizes, np.int64)
