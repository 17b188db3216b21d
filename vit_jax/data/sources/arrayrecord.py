"""ArrayRecord files read at random, a record at a time: blocks would cost more, since all records
of a block are in memory before the first is used.
"""

import bisect
import itertools
import os
import threading
from collections.abc import Mapping, Sequence

from vit_jax.base import places
from vit_jax.data.record import DataError
from vit_jax.data.sources import riegeli
from vit_jax.data.sources.ranges import Ranges, in_parallel


class ArrayRecords:
    """The records of `files`, in order, from `start` to `stop` of each; for any number of threads.

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
        self._ranges, self._opened = Ranges(), {}
        self._locks = {path: threading.Lock() for path, _, _ in self._files}

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, index: int) -> bytes:
        path, row = self.place(index)
        if places.in_bucket(path):
            return self.read([index])[0]
        return self._open(path).read([row])[0]

    def read(self, indices: Sequence[int]) -> list[bytes]:
        """Several records, those of buckets by requests at the same time.

        Raises:
          DataError: a file is missing, damaged or has changed.
          RuntimeError, ValueError: a record is damaged.
        """
        wanted = [self.place(index) for index in indices]
        in_buckets = {path for path, _ in wanted if places.in_bucket(path)}
        unopened = [path for path in in_buckets if path not in self._opened]
        if len(unopened) > 1:
            in_parallel(self._open, unopened)
        parts = [(path, *self._open(path).find(row)) for path, row in wanted if path in in_buckets]
        stored = iter(
            self._ranges.read_many([(path, first, size) for path, first, size, _ in parts])
        )
        chunks = iter(parts)

        def record(path: str, row: int) -> bytes:
            if path not in in_buckets:
                return self._open(path).read([row])[0]
            _, first, _, number = next(chunks)
            return riegeli.decode_chunk(next(stored), first)[number]

        return [record(path, row) for path, row in wanted]

    def place(self, index: int) -> tuple[str, int]:
        """The file that holds record `index`, and its number in there."""
        number = bisect.bisect_right(self._ends, index)
        path, _, stop = self._files[number]
        return path, stop - self._ends[number] + index

    def _open(self, path: str):
        """The reader of a local file, or the chunks of one in a bucket; made once."""
        if path in self._opened:
            return self._opened[path]
        with self._locks[path]:
            if path not in self._opened:
                count, opened = self._found(path)
                if count != self._examples[path]:
                    raise DataError(
                        f"{path} is damaged: {count} records, there should be {self._examples[path]}"
                    )
                self._opened[path] = opened
        return self._opened[path]

    def _found(self, path: str) -> tuple[int, object]:
        missing = DataError(f"{path} is missing, there should be {self._examples[path]} records")
        if not places.in_bucket(path):
            if not os.path.exists(path):
                raise missing
            reader = open_reader(path)
            return reader.num_records(), reader
        try:
            size = self._sizes[path] if path in self._sizes else places.describe_file(path).size
            chunks = riegeli.read_chunks(lambda *part: self._ranges.read(path, *part), size)
        except FileNotFoundError:
            raise missing from None
        except DataError:
            raise
        except ValueError as error:
            raise DataError(f"{path} is damaged: {error}") from None
        return int(chunks.records[-1]), chunks


def open_reader(path: str):
    """ArrayRecord's own reader of the local file `path`."""
    from array_record.python.array_record_module import ArrayRecordReader

    # Read-ahead helps reading in order; at random places it reads records that are not used.
    return ArrayRecordReader(path, options="readahead_buffer_size:0")
