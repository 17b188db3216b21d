"""ArrayRecord files in buckets and on mounts: where their records are, and the records, by reads of ranges.

ArrayRecord's own reader takes `gs://` alone, keeps a few requests under way whatever the number of
threads, opens what it cannot read as a file of 0 records, and reads a file's list of records each time that it
opens one; so such files are read here. On a disk it is used, see `arrayrecord.py`.

The format is Riegeli's: chunks of records, interrupted at each multiple of 64 KiB by a header of 24
bytes. ArrayRecord adds a chunk that lists all others, and in the last 64 KiB where that is. Checksums
are HighwayHash and not looked at: `vit_jax prepare --verify` reads with ArrayRecord's own reader, which
does.
"""

import dataclasses
import struct
from collections.abc import Callable

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
      places: (n + 1,) integers, first byte of each chunk, and the end of the last one.
      records: (n + 1,) integers, number of the first record of each, and how many there are in all;
        (0,) where each chunk has one record.
    """

    places: np.ndarray
    records: np.ndarray

    def __len__(self) -> int:
        """How many records there are."""
        return int(self.records[-1]) if len(self.records) else len(self.places) - 1

    def find(self, row: int) -> tuple[int, int, int]:
        """First byte and bytes of the chunk that holds a record, and the number of the record in it."""
        chunk, number = row, 0
        if len(self.records):
            row = self.records.dtype.type(row)  # another type would have the column converted
            chunk = int(np.searchsorted(self.records, row, "right")) - 1
            number = int(row - self.records[chunk])
        first, end = self.places[chunk : chunk + 2].tolist()
        return first, end - first, number


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
    postscript, ends = _chunk(tail[-_BLOCK:], size - _BLOCK)
    fields = _fields(postscript, np.asarray(ends), 2)
    if not len(fields) or fields[0, 1] != _MAGIC:
        raise ValueError("its last block is not ArrayRecord's")
    end = int(fields[0, 0])
    listed = tail[end - start :] if end >= start else read(end, size - end)
    values, ends = _chunk(listed, end)
    if not ends:
        raise ValueError("its list of chunks is empty")
    head = ends[0]
    fields = _fields(values[head:], np.asarray(ends[1:]) - head, 3).astype(np.int64)
    places, records = np.append(fields[:, 0], end), np.append(0, np.cumsum(fields[:, 2]))
    return Chunks(places, records[:0] if (fields[:, 2] == 1).all() else records)


def decode_chunk(stored: bytes, first: int) -> list[bytes]:
    """The records of the chunk with which `stored`, the bytes of a file from byte `first`, begins.

    Raises:
      ValueError: it is damaged, or not stored as ArrayRecord does unless `transpose` is set.
    """
    values, ends = _chunk(stored, first)
    return [bytes(values[a:b]) for a, b in zip([0, *ends], ends, strict=False)]


def _chunk(stored: bytes, first: int) -> tuple[memoryview, list[int]]:
    """The records of a chunk, one after the other, and where each ends; see `decode_chunk`."""
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
    single = count == 1  # as `prepare` writes them: an image each
    numbers = [_varint(sizes, 0)[0]] if single else _varints(sizes)[0][:count].astype(np.int64)
    ends = numbers if single else np.cumsum(numbers).tolist()
    if len(ends) != count or [0, *ends][-1] != len(values) or len(values) != decoded:
        raise ValueError(f"the chunk at byte {first} is damaged: its sizes do not fit")
    return memoryview(values), ends


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
    try:
        return pyarrow.Codec(_CODECS[codec]).decompress(data[place:], size, asbytes=True)
    except OSError as error:  # pyarrow's for whatever is damaged
        raise ValueError(str(error)) from None


def _fields(messages: memoryview, ends: np.ndarray, count: int) -> np.ndarray:
    """The first `count` fields of protocol buffer messages that have integers alone, (messages, count)
    uint64; 0 where a message does not have one.

    Args:
      ends: where each message ends, of those that follow each other from byte 0 on.
    """
    numbers, last = _varints(messages)
    message = np.searchsorted(ends, last, "right")
    first = np.searchsorted(
        message, np.arange(len(ends))
    )  # of each message: a tag, its value, a tag, …
    is_tag = (np.arange(len(numbers)) - first[message]) % 2 == 0
    tags = np.flatnonzero(is_tag)
    if len(numbers) != 2 * len(tags):
        raise ValueError("a message is truncated")
    fields = (numbers[tags] >> np.uint64(3)).astype(np.int64)
    values = np.zeros((len(ends), count), np.uint64)
    wanted = (fields >= 1) & (fields <= count)
    values[message[tags[wanted]], fields[wanted] - 1] = numbers[tags[wanted] + 1]
    return values


def _varints(data: memoryview | bytes) -> tuple[np.ndarray, np.ndarray]:
    """The numbers that follow each other in `data`, (n,) uint64, and where the last byte of each is."""
    content = np.frombuffer(data, np.uint8)
    last = np.flatnonzero(content < 128)
    if len(content) and (not len(last) or last[-1] != len(content) - 1):
        raise ValueError("a number is truncated")
    first = np.append(0, last[:-1] + 1)[: len(last)]
    sizes = last - first + 1
    if sizes.max(initial=0) > 10:
        raise ValueError("a number has more than 64 bits")
    numbers = np.zeros(len(last), np.uint64)
    for place in range(int(sizes.max(initial=0))):
        active = sizes > place
        digits = (content[first[active] + place] & 127).astype(np.uint64)
        numbers[active] |= digits << np.uint64(7 * place)
    return numbers, last


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
