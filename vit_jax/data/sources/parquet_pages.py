"""Where the values of a column of bytes are in a Parquet file: by the headers of its pages, which are structs of
Thrift's compact protocol, and by the lengths in front of the values.

The format's parquet.thrift has the numbers of fields, kinds and encodings.
"""

import dataclasses
import io
import itertools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

if TYPE_CHECKING:
    import pyarrow.parquet

_LENGTH = struct.Struct("<I")
_PLAIN = 0
_BY_DICTIONARY = (2, 8)
_ENCODINGS = {5: "DELTA_BINARY_PACKED", 6: "DELTA_LENGTH_BYTE_ARRAY", 7: "DELTA_BYTE_ARRAY"}
_CODECS = {
    "SNAPPY": "snappy",
    "GZIP": "gzip",
    "BROTLI": "brotli",
    "ZSTD": "zstd",
    "LZ4": "lz4_raw",
}
_NO_VALUE = (0, 0, 0)

# Fields of a page's header.
_KIND = 1
_INFLATED = 2
_STORED = 3
_DATA = 5
_DICTIONARY = 7
_DATA_2 = 8
# Kinds of pages.
_KIND_DATA = 0
_KIND_DICTIONARY = 2
_KIND_DATA_2 = 3
# Fields of the header of a page of values.
_COUNT = 1
_ENCODING = 2
_ENCODING_2 = 4
_LEVELS_2 = 5
_REPEATS_2 = 6
_COMPRESSED_2 = 7

_Place = tuple[int, int, int]  # page, first byte, bytes; see `Values.places`


class UnknownEncoding(ValueError):
    """Pages are encoded or compressed in a way that is not read."""


@dataclasses.dataclass
class Values:
    """The values of a column.

    Attributes:
      places: (page, first byte, bytes) of each row's value; no bytes mean that it has none. The first byte is counted
        in the decompressed page, or in the file if the page is not compressed.
      pages: (first byte, bytes, decompressed bytes) of each page in the file; 0 if it is not compressed.
      codec: pyarrow's name for the compression of pages; '' if none is compressed.
    """

    places: list[_Place] = dataclasses.field(default_factory=list)
    pages: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)
    codec: str = ""


@dataclasses.dataclass
class _Page:
    """The content of a page, opened where its values begin.

    Attributes:
      number: in `Values.pages`.
      content: the file, or the decompressed page.
      end: the number of the byte in `content` that follows its last one.
    """

    number: int
    content: BinaryIO
    end: int


def add_values(
    opened: BinaryIO,
    chunk: "pyarrow.parquet.ColumnChunkMetaData",
    most_defined: int,
    values: Values,
) -> None:
    """Adds the values of a column in one row group to `values`.

    Args:
      opened: the file.
      chunk: the metadata of the column in the row group.
      most_defined: the column's largest definition level, which a row with a value has.

    Raises:
      UnknownEncoding: see there.
      ValueError, KeyError, IndexError, struct.error: the file is damaged.
    """
    codec = _codec_of(chunk)
    if codec and codec != (values.codec or codec):
        raise UnknownEncoding(f"compressed by both {values.codec} and {codec}")
    values.codec = codec or values.codec
    opened.seek(min(filter(None, (chunk.dictionary_page_offset, chunk.data_page_offset))))
    dictionary: list[_Place] = []
    end_of_rows = len(values.places) + chunk.num_values
    while len(values.places) < end_of_rows:
        header = _read_struct(opened)
        begin = opened.tell()
        if header[_KIND] == _KIND_DICTIONARY:
            page = _open_page(opened, header, codec, 0, values)
            dictionary = _plain_places(page, header[_DICTIONARY][_COUNT])
        elif header[_KIND] == _KIND_DATA:
            about = header[_DATA]
            page = _open_page(opened, header, codec, 0, values)
            size = _unpack_length(page.content) if most_defined else 0
            levels = page.content.read(size)
            values.places += _places(
                page, levels, about[_COUNT], about[_ENCODING], most_defined, dictionary
            )
        elif header[_KIND] == _KIND_DATA_2:
            about = header[_DATA_2]
            levels = opened.read(about[_REPEATS_2] + about[_LEVELS_2])
            is_compressed = about.get(_COMPRESSED_2, True)
            page = _open_page(opened, header, codec if is_compressed else "", len(levels), values)
            values.places += _places(
                page, levels, about[_COUNT], about[_ENCODING_2], most_defined, dictionary
            )
        opened.seek(begin + header[_STORED])


def _codec_of(chunk: "pyarrow.parquet.ColumnChunkMetaData") -> str:
    """How pyarrow calls the compression of a column; '' if there is none."""
    if chunk.compression == "UNCOMPRESSED":
        return ""
    if chunk.compression not in _CODECS:
        raise UnknownEncoding(f"compressed by {chunk.compression}")
    return _CODECS[chunk.compression]


def decompress(content: bytes, size: int, codec: str) -> bytes:
    """A page as it is without compression.

    Raises:
      OSError: it is damaged.
    """
    import pyarrow

    return pyarrow.decompress(content, size, codec=codec, asbytes=True)


def _open_page(
    opened: BinaryIO, header: dict[int, Any], codec: str, skipped: int, values: Values
) -> _Page:
    """Opens the page whose header and first `skipped` bytes were read, and adds it to `values`."""
    first = opened.tell()
    size = header[_STORED] - skipped
    number = len(values.pages)
    if not codec:
        values.pages.append((first, size, 0))
        return _Page(number, opened, first + size)
    inflated = header[_INFLATED] - skipped
    values.pages.append((first, size, inflated))
    content = decompress(opened.read(size), inflated, codec) if inflated else b""
    return _Page(number, io.BytesIO(content), inflated)


def _places(
    page: _Page,
    levels: bytes,
    count: int,
    encoding: int,
    most_defined: int,
    dictionary: Sequence[_Place],
) -> list[_Place]:
    """The places of the values of a page, for each of its `count` rows."""
    defined = np.ones(count, bool)
    if most_defined:
        defined = _unpack_numbers(levels, most_defined.bit_length(), count) == most_defined
    present = int(defined.sum())
    if encoding == _PLAIN:
        places = _plain_places(page, present)
    elif encoding in _BY_DICTIONARY and present:
        width = page.content.read(1)[0]
        packed = page.content.read(page.end - page.content.tell())
        places = [dictionary[i] for i in _unpack_numbers(packed, width, present).tolist()]
    elif encoding in _BY_DICTIONARY:
        places = []
    else:
        raise UnknownEncoding(f"encoded by {_ENCODINGS.get(encoding, encoding)}")
    following = iter(places)
    return [next(following) if is_there else _NO_VALUE for is_there in defined.tolist()]


def _plain_places(page: _Page, count: int) -> list[_Place]:
    """The places of `count` values one after the other, each with its length in front."""
    places = []
    for _ in range(count):
        size = _unpack_length(page.content)
        places.append((page.number, page.content.tell(), size))
        page.content.seek(size, io.SEEK_CUR)
    if page.content.tell() > page.end:
        raise ValueError("a value is longer than its page")
    return places


def _unpack_length(content: BinaryIO) -> int:
    return _LENGTH.unpack(content.read(_LENGTH.size))[0]


def _unpack_numbers(packed: bytes, width: int, count: int) -> np.ndarray:
    """Numbers of `width` bits in runs, each of one number or of packed ones, (count,); the format's RLE encoding."""
    if not width:
        return np.zeros(count, np.int64)
    content = io.BytesIO(packed)
    runs = [np.empty(0, np.int64)]
    unpacked = 0
    while unpacked < count:
        head = _read_varint(content)
        if head & 1:
            stored = np.frombuffer(content.read((head >> 1) * width), np.uint8)
            bits = np.unpackbits(stored, bitorder="little")
            run = bits.reshape(-1, width) @ (1 << np.arange(width))
        else:
            number = int.from_bytes(content.read((width + 7) // 8), "little")
            run = np.full(min(head >> 1, count - unpacked), number)
        if not len(run):
            raise ValueError("a run of numbers is empty")
        runs.append(run)
        unpacked += len(run)
    return np.concatenate(runs)[:count]


def _read_struct(opened: BinaryIO) -> dict[int, Any]:
    """A struct of Thrift's compact protocol: number of a field → its value."""
    fields: dict[int, Any] = {}
    number = 0
    for _ in itertools.count():
        head = opened.read(1)[0]
        if head == 0:
            break
        step = head >> 4
        number = number + step if step else _read_integer(opened)
        fields[number] = _read_value(opened, head & 15)
    return fields


def _read_value(opened: BinaryIO, kind: int) -> Any:
    if kind in (1, 2):
        return kind == 1
    if kind in (4, 5, 6):
        return _read_integer(opened)
    if kind == 8:
        return opened.read(_read_varint(opened))
    if kind == 12:
        return _read_struct(opened)
    raise ValueError(f"the header of a page has a field of the kind {kind}")


def _read_integer(opened: BinaryIO) -> int:
    zigzag = _read_varint(opened)
    return (zigzag >> 1) ^ -(zigzag & 1)


def _read_varint(opened: BinaryIO) -> int:
    number = 0
    for shift in itertools.count(0, 7):
        byte = opened.read(1)[0]
        number |= (byte & 127) << shift
        if byte < 128:
            break
    return number
