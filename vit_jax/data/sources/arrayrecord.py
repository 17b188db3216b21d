"""ArrayRecord files read at random, a record at a time: blocks would cost more, since all records
of a block are in memory before the first is used.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence

from etils import epath

from vit_jax.data.record import DataError


class ArrayRecords:
    """The records of `files`, in order, from `start` to `stop` of each.

    Args:
      files: (path, start, stop) each.
      examples: path → how many records are in the whole file.
    """

    def __init__(self, files: Sequence[tuple[str, int, int]], examples: Mapping[str, int]):
        self._files, self._examples = tuple(files), examples
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in self._files))
        self._readers = {}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        path, row = self.place(index)
        return self._reader(path).read([row])[0]

    def place(self, index: int) -> tuple[str, int]:
        """The file that holds record `index`, and its number in there."""
        number = bisect.bisect_right(self._ends, index)
        path, _, stop = self._files[number]
        return path, stop - self._ends[number] + index

    def _reader(self, path: str):
        if path not in self._readers:
            reader = open_reader(path) if epath.Path(path).exists() else None
            if reader is None or reader.num_records() != self._examples[path]:
                there = "missing" if reader is None else f"damaged: {reader.num_records()} records"
                raise DataError(f"{path} is {there}, there should be {self._examples[path]}")
            self._readers[path] = reader
        return self._readers[path]


def open_reader(path: str):
    """An ArrayRecord reader of the file `path`."""
    from array_record.python.array_record_module import ArrayRecordReader

    # Read-ahead helps reading in order; at random places it reads records that are not used.
    return ArrayRecordReader(path, options="readahead_buffer_size:0")
