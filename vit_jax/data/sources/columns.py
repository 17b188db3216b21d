"""Where the records of many files are, as columns of numbers in one file, which is mapped into memory: what is not
looked up takes no memory, and what one process of a machine has read, the others find there.

The format: a magic number, the bytes of the header and a checksum of them; the header, MessagePack; then the columns,
each from a multiple of 64 bytes on. A column has any number of values of each file, one file after the other; beside it
stands where the values of each file end.
"""

import dataclasses
import mmap
import os
import pathlib
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO, Self

import msgpack
import numpy as np

from vit_jax.base import places

_MAGIC = b"vit_jax index 2\n"
_START = struct.Struct(
    "<16sQII"
)  # magic, bytes of the header, checksum of the header, of the columns
_ALIGNED = 64
_CODE = "code"  # the column that counts in the table
_CHUNK = 1 << 24
NAMES = {"unicode_errors": "surrogateescape"}  # names inside tar files may be any bytes


class DamagedIndex(ValueError):
    """A file is no index, or not a whole one."""


@dataclasses.dataclass(frozen=True)
class FileColumns:
    """What is known of one file.

    Attributes:
      columns: name → (n,) integers, in any number for each column.
      table: what the numbers of the column `code` mean, if there is one.
      note: numbers, texts, and lists and dictionaries of these.
    """

    columns: Mapping[str, np.ndarray]
    table: Sequence[Any] = ()
    note: Any = None


class Index:
    """What is known of files.

    Attributes:
      kind: of the files, and of the version of what was read of them.
      folder: in which the files are, as it is written in their paths.
      files: by their names in the folder, in the order of the columns: size and identity.
      table: see `FileColumns`; of all files.
      notes: of each file.
    """

    def __init__(self, kind: str, files: Mapping[str, places.File], table, notes, columns, ends):
        self.kind, self.files, self.table, self.notes = kind, dict(files), table, notes
        self.folder = ""
        self._columns: dict[str, np.ndarray] = columns
        self._ends: dict[str, np.ndarray] = ends
        self._numbers = {name: number for number, name in enumerate(self.files)}
        self._mapped: mmap.mmap | None = None

    @property
    def is_stored(self) -> bool:
        """Whether it is in a file, as it is."""
        return self._mapped is not None

    def has(self, file: places.File) -> bool:
        """Whether a file, as storage describes it, is the one that was read."""
        known = self.files.get(name_in(self.folder, file.path))
        return known is not None and (known.size, known.identity) == (file.size, file.identity)

    def number(self, path: str) -> int:
        """The number of a file."""
        return self._numbers[name_in(self.folder, path)]

    def column(self, name: str, number: int) -> np.ndarray:
        """A column of the file `number`."""
        ends = self._ends[name]
        first = int(ends[number - 1]) if number else 0
        return self._columns[name][first : int(ends[number])]

    def has_column(self, name: str, number: int) -> bool:
        """Whether the file `number` has any values in a column."""
        return name in self._ends and self.count(name, number) > 0

    def count(self, name: str, number: int) -> int:
        """How many values a column has of the file `number`."""
        ends = self._ends[name]
        return int(ends[number]) - (int(ends[number - 1]) if number else 0)

    def part(self, number: int) -> FileColumns:
        """What is known of the file `number`, with the table of all files."""
        columns = {name: self.column(name, number) for name in self._columns}
        return FileColumns(columns, self.table, self.notes[number])

    def release(self) -> None:
        """Lets go of the memory of what was looked at, until it is looked at again."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    @classmethod
    def of(cls, kind: str, parts: Mapping[places.File, FileColumns], folder: str = "") -> Self:
        """The index of files, in memory."""
        files = {name_in(folder, file.path): file for file in parts}
        table, renumbered = _one_table(parts.values())
        names = dict.fromkeys(name for part in renumbered for name in part)
        columns, ends = {}, {}
        for name in names:
            arrays = [part.get(name, np.empty(0, np.uint8)) for part in renumbered]
            columns[name] = np.concatenate(arrays)
            ends[name] = np.cumsum([len(array) for array in arrays])
        index = cls(kind, files, table, [part.note for part in parts.values()], columns, ends)
        index.folder = folder
        return index

    def write(self, path: pathlib.Path) -> None:
        """Writes it to a file that nobody reads yet."""
        arrays = {name: array for name, array in self._arrays()}
        header = {
            "kind": self.kind,
            "files": [[name, file.size, file.identity] for name, file in self.files.items()],
            "table": list(self.table),
            "notes": self.notes,
            "columns": [[name, array.dtype.str, len(array)] for name, array in arrays.items()],
        }
        packed = msgpack.packb(header, **NAMES)
        with open(path, "wb") as file:
            file.write(bytes(_START.size) + packed)
            checksum = 0
            for array in arrays.values():
                checksum = _write(file, bytes(-file.tell() % _ALIGNED), checksum)
                for first in range(0, len(array), _CHUNK):
                    part = np.ascontiguousarray(array[first : first + _CHUNK])
                    checksum = _write(file, part.data, checksum)
            file.seek(0)
            file.write(_START.pack(_MAGIC, len(packed), zlib.crc32(packed), checksum))
            file.flush()
            os.fsync(file.fileno())  # else the name may reach the disk before the content

    def _arrays(self) -> Iterator[tuple[str, np.ndarray]]:
        for name, array in self._columns.items():
            yield name, array
            yield f"{name}/ends", np.asarray(self._ends[name], "<i8")


def open_index(path: pathlib.Path, *, verify: bool = False) -> Index:
    """The index in a local file, mapped into memory.

    Args:
      verify: whether the checksum of the columns is compared, for which all are read.

    Raises:
      FileNotFoundError: there is no such file.
      DamagedIndex: it is no index, or not a whole one.
    """
    with open(path, "rb") as file:
        start = file.read(_START.size)
        if len(start) < _START.size or not start.startswith(_MAGIC):
            raise DamagedIndex("it is no index of this version")
        _, size, checksum, of_columns = _START.unpack(start)
        packed = file.read(min(size, os.fstat(file.fileno()).st_size))
        if len(packed) != size or zlib.crc32(packed) != checksum:
            raise DamagedIndex("its header is damaged")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        header = msgpack.unpackb(packed, use_list=False, **NAMES)
        place, arrays = _START.size + size, {}
        for name, dtype, count in header["columns"]:
            place += -place % _ALIGNED
            end = place + count * np.dtype(dtype).itemsize
            if end > len(mapped):
                raise DamagedIndex("it is truncated")
            arrays[name] = np.frombuffer(mapped, dtype, count, place)
            place = end
        if verify and _checksum(file, _START.size + size) != of_columns:
            raise DamagedIndex("its columns are damaged")
    columns = {name: array for name, array in arrays.items() if f"{name}/ends" in arrays}
    ends = {name: arrays[f"{name}/ends"] for name in columns}
    files = {name: places.File(name, size, identity) for name, size, identity in header["files"]}
    index = Index(header["kind"], files, header["table"], header["notes"], columns, ends)
    index._mapped = mapped
    return index


def name_in(folder: str, path: str) -> str:
    """The name of a file in a folder, or in one of its folders."""
    return path.removeprefix(f"{folder}/") if folder else path


def smallest(numbers: np.ndarray) -> np.ndarray:
    """Numbers that are not negative, in 4 bytes each where that suffices, else in 8."""
    fits = not len(numbers) or int(numbers.max()) < 2**32
    return np.asarray(numbers).astype("<u4" if fits else "<u8")


def _one_table(parts) -> tuple[tuple, list[Mapping[str, np.ndarray]]]:
    """One table for all files, and their columns with codes that count in it."""
    numbers, renumbered, known = {}, [], {}
    for part in parts:
        columns = dict(part.columns)
        if _CODE in columns:
            if id(part.table) not in known:  # files of an earlier index have one in common
                rows = [numbers.setdefault(row, len(numbers)) for row in part.table]
                known[id(part.table)] = part.table, np.asarray(rows, "<u4")
            columns[_CODE] = known[id(part.table)][1][columns[_CODE]]
        renumbered.append(columns)
    return tuple(numbers), renumbered


def _write(file: BinaryIO, content: bytes | memoryview, checksum: int) -> int:
    file.write(content)
    return zlib.crc32(content, checksum)


def _checksum(file: BinaryIO, first: int) -> int:
    """Of what a file has from byte `first` on."""
    file.seek(first)
    checksum = 0
    while content := file.read(_CHUNK):
        checksum = zlib.crc32(content, checksum)
    return checksum
