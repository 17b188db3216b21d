"""Records of a source kept on a local disk: for data in buckets and on slow disks, which epochs after
the first then read from near.

FOLDER/FINGERPRINT/ has for a data set `index`, 24 bytes for each example, and `data-0`, `data-1`, …, to
each of which one process at a time appends. The processes of a host share them: what one has read, the
others find. Every record has a checksum; what does not match is read from the source again. So is a record whose
source says that it was replaced since: in buckets it has the `identity` of its example. Nothing is
removed: every example comes once an epoch, so that no record is worth more than another. When the bound
is reached, or the disk is full, what is not there stays with the source.
"""

import contextlib
import fcntl
import os
import pathlib
import struct
import threading
import zlib

from absl import logging

from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.data import packing
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.options import Data
from vit_jax.data.record import Labels, Record, Source, soft_labels

# Of the format, part of the folder's name: without and with what an example is recognised by.
_VERSION, _IDENTIFIED = "1", "2"
# An example's entry: number of the data file + 1, bytes, first byte, checksums of record and entry.
_ENTRY = struct.Struct("<IIQII")
_CHECKED = _ENTRY.size - 4  # bytes of an entry that its checksum is of
_GRANT = 64 * 2**20  # bytes written until the folder is measured again: others write too


def cached(source: Source, config_data: Data) -> Source:
    """`source`, or where `config_data.cache` names a folder, the same by way of it.

    Raises:
      ConfigError: the folder is in a bucket, or cannot be made or written to.
    """
    folder = config_data.cache
    if not folder:
        return source
    if places.in_bucket(folder):
        raise ConfigError(f"config.data.cache = {folder!r} must be a folder on a local disk")
    folder = pathlib.Path(outputs.make_folder(folder, "--config.data.cache"))
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--config.data.cache={folder}: the folder cannot be written to")
    return CachedSource(source, folder, int(config_data.cache_gib * 2**30))


class CachedSource:
    """A source whose records are kept in a folder; see `record.Source`."""

    def __init__(self, source: Source, folder: pathlib.Path, most_bytes: int):
        """Opens or begins the cache of `source`.

        Args:
          folder: of the caches of all data sets.
          most_bytes: of all of them together.
        """
        self._args = source, folder, most_bytes
        self.classes, self.multi_label = source.classes, source.multi_label
        self.soft_labels, self.masks = soft_labels(source), mask_table(source)
        self._source = source
        # All names and contents of a bucket follow a dash: one that is rewritten leaves the others usable.
        mark = source.fingerprint().partition("-")[0]
        self._identity = getattr(source, "identity", _unknown)
        version = _VERSION if self._identity(0) is None else _IDENTIFIED
        self._files = _Files(folder, f"{version}-{mark}", most_bytes)
        if hasattr(source, "read"):
            self.read = self._read

    def __reduce__(self):
        return CachedSource, self._args  # another process has its own data file

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Record:
        record = self._load(index)
        if record is not None:
            return record
        record = self._source[index]
        self._keep(index, record)
        return record

    @property
    def labels(self) -> Labels:
        """Those of the source."""
        return self._source.labels

    def fingerprint(self) -> str:
        """That of the source."""
        return self._source.fingerprint()

    def _read(self, indices: list[int]) -> list[Record]:
        """Several records: those that are not there with one call of the source."""
        records = [self._load(index) for index in indices]
        missing = [index for index, record in zip(indices, records, strict=True) if record is None]
        fetched = iter(self._source.read(missing) if missing else ())
        for place, index in enumerate(indices):
            if records[place] is None:
                records[place] = next(fetched)
                self._keep(index, records[place])
        return records

    def _load(self, index: int) -> Record | None:
        """The record that is kept of an example as it is now."""
        content = self._files.load(index)
        if content is None:
            return None
        record, identity = unpack(content)
        return record if identity == self._identity(index) else None

    def _keep(self, index: int, record: Record) -> None:
        if len(record.image):  # else it is damaged
            self._files.store(index, pack(record, self._identity(index)))


class _Files:
    """The index and data files of a data set."""

    def __init__(self, folder: pathlib.Path, name: str, most_bytes: int):
        self._all, self._folder, self._most_bytes = folder, folder / name, most_bytes
        self._opened: list[int] = []
        self._data: dict[int, int] = {}  # number of a data file -> its descriptor
        # Number and descriptor of the one that this process appends to.
        self._own: tuple[int, int] | None = None
        self._end = self._granted = 0
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._stopped = self._warned = False
        self._folder.mkdir(parents=True, exist_ok=True)
        self._index = self._open("index", os.O_RDWR | os.O_CREAT)

    def __del__(self):
        for file in self._opened:
            os.close(file)  # which lets another process append

    def load(self, index: int) -> bytes | None:
        """The content for an example, if it is there and whole."""
        entry = os.pread(self._index, _ENTRY.size, index * _ENTRY.size)
        if len(entry) < _ENTRY.size or not any(entry):
            return None
        number, size, first, checksum, own_checksum = _ENTRY.unpack(entry)
        content = b""
        if own_checksum == _checksum(entry, index):
            with contextlib.suppress(OSError):  # someone removed it
                content = os.pread(self._file(number - 1), size, first)
        if len(content) == size and zlib.crc32(content) == checksum and size:
            return content
        if not self._warned:
            self._warned = True
            logging.warning(
                "%s: the entry of image number %d is damaged; this and others like it are read again",
                self._folder, index,
            )  # fmt: skip
        return None

    def store(self, index: int, content: bytes) -> None:
        """Keeps the content for an example, if there is room."""
        try:
            first = self._reserve(len(content))
            if first is None:
                return
            number, file = self._own
            _write(file, content, first)
            entry = _ENTRY.pack(number + 1, len(content), first, zlib.crc32(content), 0)
            entry = entry[:_CHECKED] + struct.pack("<I", _checksum(entry, index))
            _write(self._index, entry, index * _ENTRY.size)
        except OSError as error:
            self._stop(f"cannot be written to ({error.strerror})")

    def _reserve(self, size: int) -> int | None:
        """Where in the own data file `size` bytes may go; None: nowhere any more."""
        with self._lock:
            if self._stopped:
                return None
            if self._own is None:
                self._take_file()
            if size > self._granted:
                used = sum(file.stat().st_size for file in self._all.glob("*/data-*"))
                room = self._most_bytes - used
                if size > room:
                    gib = self._most_bytes / 2**30
                    self._stop(f"is full (config.data.cache_gib = {gib:g}; used: {used} bytes)")
                    return None
                self._granted = max(size, min(_GRANT, room // 8))
            first, self._end = self._end, self._end + size
            self._granted -= size
            return first

    def _take_file(self) -> None:
        """Opens the first data file that no other process appends to."""
        number = 0
        while self._own is None:
            file = self._open(f"data-{number}", os.O_RDWR | os.O_CREAT)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                number += 1
                continue
            self._own, self._end = (number, file), os.fstat(file).st_size

    def _file(self, number: int) -> int:
        """The descriptor of a data file."""
        with self._reading:
            if number not in self._data:
                self._data[number] = self._open(f"data-{number}", os.O_RDONLY)
            return self._data[number]

    def _open(self, name: str, mode: int) -> int:
        file = os.open(self._folder / name, mode, 0o644)
        self._opened.append(file)
        return file

    def _stop(self, why: str) -> None:
        if not self._stopped:
            self._stopped = True
            logging.warning(
                "config.data.cache: %s %s: what is not there is read each time", self._all, why
            )


def pack(record: Record, identity: tuple | None = None) -> bytes:
    """The stored form of any record, and of its source's `identity` of the example."""
    known = () if identity is None else (identity,)
    return packing.pack((record.image, record.label, record.name, *known))


def unpack(content: bytes) -> tuple[Record, tuple | None]:
    """What `pack` made `content` of."""
    image, label, name, *known = packing.unpack(content)
    return Record(image, label, name), known[0] if known else None


def _unknown(index: int) -> None:
    """The identity of an example of a source that knows none."""


def _checksum(entry: bytes, index: int) -> int:
    return zlib.crc32(entry[:_CHECKED], index & 0xFFFFFFFF)


def _write(file: int, content: bytes, first: int) -> None:
    """Writes all of `content`: where a disk becomes full, a call may write a part."""
    while content:
        written = os.pwrite(file, content, first)
        content, first = content[written:], first + written
