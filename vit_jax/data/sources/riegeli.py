"""ArrayRecord files in buckets: where their records are, and the records, by reads of ranges.

ArrayRecord's own reader takes `gs://` alone, keeps a few requests under way whatever the number of
threads, and opens what it cannot read as a file of 0 records; so files in buckets are read here. On a
disk it is used, see `arrayrecord.py`.

The format is Riegeli's: chunks of records, interrupted at each multiple of 64 KiB by a header of 24
bytes. ArrayRecord adds a chunk that lists all others, and in the last 64 KiB where that is. Checksums
are HighwayHash and not looked at: `vit_jax prepare --verify` reads with ArrayRecord's own reader, which
does.
"""

import dataclasses
import itertools
import struct
from collections.abc import Callable, Iterator

import numpy as np

_BLOCK, _BLOCK_HEADER = 1 << 16, 24
_CHUNK_HEADER = struct.Struct(
    "<QQQQQ"
)  # hash, data bytes, hash, kind | records << 8, decoded bytes
_TAIL = 3 * _BLOCK  # of a file: most lists of chunks, and the block that says where the list is
_MAGIC = 0x71930E704FDAE05E
_SIMPLE = ord("r")  # the kind of a chunk whose records are one after the other
_CODECS = {ord("z"): "zstd", ord("b"): "brotli", ord("s"): "snappy"}


@dataclasses.dataclass(frozen=True)
class Chunks:
    """Where the records of a file are.

    Attributes:
      places: (n + 1,) int64, first byte of each chunk, and the end of the last one.
      records: (n + 1,) int64, number of the first record of each, and how many there are in all.
    """

    places: np.ndarray
    records: np.ndarray

    def find(self, row: int) -> tuple[int, int, int]:
        """First byte and bytes of the chunk that holds a record, and the number of the record in it."""
        chunk = int(np.searchsorted(self.records, row, "right")) - 1
        first, end = self.places[chunk : chunk + 2].tolist()
        return first, end - first, row - int(self.records[chunk])


def read_chunks(read: Callable[[int, int], bytes], size: int) -> Chunks:
    """Finds the records of a file.

    Args:
      read: (first byte, bytes) -> that part of the file.
      size: of the file.

    Raises:
      ValueError: it is no ArrayRecord file, or is damaged.
    """
    if size < 2 * _BLOCK or size % _BLOCK:
        raise ValueError(f"its size, {size} bytes, is that of no whole ArrayRecord file")
    start = max(size - _TAIL, 0)
    tail = read(start, size - start)
    (postscript, *_) = decode_chunk(tail[-_BLOCK:], size - _BLOCK)
    fields = dict(_varints(postscript))
    if fields.get(2) != _MAGIC:
        raise ValueError("its last block is not ArrayRecord's")
    end = fields[1]
    listed = tail[end - start :] if end >= start else read(end, size - end)
    (head, *entries) = decode_chunk(listed, end)
    places, counts = [], []
    for entry in entries:
        fields = dict(_varints(entry))
        places.append(fields.get(1, 0))
        counts.append(fields.get(3, 0))
    return Chunks(np.array([*places, end]), np.array([0, *itertools.accumulate(counts)]))


def decode_chunk(stored: bytes, first: int) -> list[bytes]:
    """The records of the chunk with which `stored`, the bytes of a file from byte `first`, begins.

    Raises:
      ValueError: it is damaged, or not stored as ArrayRecord does unless `transpose` is set.
    """
    stored = _without_block_headers(stored, first)
    if len(stored) < _CHUNK_HEADER.size:
        raise ValueError(f"the chunk at byte {first} is truncated")
    _, size, _, kind, decoded = _CHUNK_HEADER.unpack_from(stored)
    data = memoryview(stored)[_CHUNK_HEADER.size :][:size]
    count, kind = kind >> 8, kind & 255
    if kind != _SIMPLE or len(data) < max(size, 1):
        raise ValueError(f"the chunk at byte {first} is damaged, or of the kind {chr(kind)!r}")
    codec = data[0]
    bytes_of_sizes, place = _varint(data, 1)
    sizes = _decompress(codec, data[place : place + bytes_of_sizes])
    values = _decompress(codec, data[place + bytes_of_sizes :])
    ends = list(itertools.accumulate(itertools.islice(_numbers(sizes), count)))
    if len(ends) != count or (ends and ends[-1] != len(values)) or len(values) != decoded:
        raise ValueError(f"the chunk at byte {first} is damaged: its sizes do not fit")
    return [bytes(values[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _without_block_headers(stored: bytes, first: int) -> bytes:
    before = -first % _BLOCK
    if before >= len(stored):
        return stored
    blocks = range(before, len(stored), _BLOCK)
    return b"".join([stored[:before], *(stored[b + _BLOCK_HEADER : b + _BLOCK] for b in blocks)])


def _decompress(codec: int, data: memoryview) -> memoryview | bytes:
    if not codec:
        return data
    if codec not in _CODECS:
        raise ValueError(f"compression {chr(codec)!r} is not known")
    import pyarrow  # slow to import, and what `prepare` writes is not compressed

    size, place = _varint(data, 0)
    if not size:
        return b""
    return pyarrow.Codec(_CODECS[codec]).decompress(data[place:], size, asbytes=True)


def _varints(message: bytes) -> Iterator[tuple[int, int]]:
    """(number, value) of the fields of a protocol buffer message that has integers alone."""
    numbers = _numbers(message)
    for tag, value in zip(numbers, numbers, strict=True):
        yield tag >> 3, value


def _numbers(data: memoryview | bytes) -> Iterator[int]:
    place = 0
    while place < len(data):
        value, place = _varint(data, place)
        yield value


def _varint(data: memoryview | bytes, place: int) -> tuple[int, int]:
    """The number that begins at `place`, and where the next one does."""
    value = shift = 0
    while True:
        if place >= len(data):
            raise ValueError("a number is truncated")
        byte = data[place]
        value |= (byte & 127) << shift
        shift, place = shift + 7, place + 1
        if byte < 128:
            return value, place
