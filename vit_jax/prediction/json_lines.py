"""The progress of long work in a file of JSON objects, one a line. Each is added as soon as its part of the work is
done: a process that is killed loses at most the last line, and the next one continues.
"""

import json
import os
import time
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from etils import epath

from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.prediction.images import Named

_FIRST = b'{"made_by": '  # the beginning of every such file
_EVERY = 60.0  # seconds between two uploads: objects cannot be appended to


class JsonLines:
    """The file of one kind of work. Its first line has the settings of the work, each further one a finished part.

    Attributes:
      rows: the parts that earlier processes finished, in their order.
      exists: whether the file is there.
    """

    def __init__(self, path: epath.Path, made_by: dict[str, Any], cure: str):
        """Reads the file, if it is there; nothing is written.

        Args:
          made_by: the settings of the work; the file must have the same.
          cure: the end of messages, which says what to do otherwise.

        Raises:
          ConfigError: the file is of other work, or no such file.
        """
        self._path = path
        self._in_bucket = places.in_bucket(path)
        self.exists = places.exists(path)
        content = places.read_bytes(path) if self.exists else b""
        whole = content[: content.rfind(b"\n") + 1]  # the last line may have been cut off
        if not content.startswith(_FIRST[: len(content)]):
            raise ConfigError(f"{path} was not written by this command: {cure}")
        try:
            rows = [json.loads(line) for line in whole.splitlines()]
            before = dict(rows[0]["made_by"]) if rows else made_by
        except (ValueError, TypeError, KeyError):
            raise ConfigError(f"{path} was not written by this command: {cure}") from None
        made_by = json.loads(json.dumps(made_by))
        if others := [name for name in made_by if before.get(name) != made_by[name]]:
            raise ConfigError(f"{path} is of work with other {', '.join(others)}: {cure}")
        self.rows = rows[1:]
        self._content = whole
        self._header = b"" if rows else _line({"made_by": made_by})
        self._file = -1
        self._uploaded = time.monotonic()

    def __enter__(self) -> "JsonLines":
        if self._in_bucket:
            self._content += self._header
            return self
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        os.ftruncate(self._file, len(self._content))
        os.lseek(self._file, 0, os.SEEK_END)
        self._write(self._header)
        return self

    def add(self, rows: Iterable[dict[str, Any]], *, now: bool = False) -> None:
        """Adds lines. In a bucket they are stored within a minute of the work, or `now`."""
        lines = b"".join(map(_line, rows))
        if not self._in_bucket:
            self._write(lines)
            return
        self._content += lines
        if now or time.monotonic() - self._uploaded > _EVERY:
            self._upload()

    def keep(self, count: int) -> None:
        """Keeps the first rows alone; before the file is entered."""
        self.rows = self.rows[:count]
        lines = self._content.splitlines(keepends=True)
        self._content = b"".join(lines[: count + 1])

    def __exit__(self, *_) -> None:
        if self._in_bucket:
            self._upload()
        else:
            os.close(self._file)

    def _write(self, content: bytes) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(self._file, rest) :]

    def _upload(self) -> None:
        with outputs.writing(self._path) as partial:
            partial.write_bytes(self._content)
        self._uploaded = time.monotonic()


def content_mark(file: Named) -> list[int]:
    """Numbers that differ where an image was changed since: of a file on a disk its size and when it was written, of
    what is in memory a checksum. Of an object in a bucket, and of what is not there, none.
    """
    if file.content is not None:
        content = file.content
        whole = content.tobytes() if isinstance(content, np.ndarray) else content
        return [len(whole), zlib.crc32(whole)]
    if places.in_bucket(file.name):
        return []
    try:
        status = os.stat(file.name)
    except OSError:
        return []
    return [status.st_size, status.st_mtime_ns]


def checksum_of(*values: object) -> str:
    """A short text that differs where values do, such as sections of a config."""
    return f"{zlib.crc32(repr(values).encode()):08x}"


def _line(row: dict[str, Any]) -> bytes:
    return json.dumps(row).encode() + b"\n"
