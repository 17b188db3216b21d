"""Bytes of the files that records are in: whole files, or parts of them, from a disk or a bucket.

Buckets are read with TensorStore, as checkpoints are: hundreds of requests may be under way, by
threads that are not Python's. It repeats what fails for a while (429, 5xx, connections that are reset or
end early); what lasts is an error. Listing and writing are in `base/places.py`.
"""

import concurrent.futures
import contextlib
import functools
import io
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import BinaryIO

from vit_jax.base import buckets, places
from vit_jax.data.decoding import images
from vit_jax.data.record import BadImage, DataError
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.text import readable

# Requests under way at a time; that many images may be read ahead.
CONCURRENCY = 512
# The delay doubles from one retry to the next: all of them take about 90 s.
_RETRIES = {"max_retries": 9, "initial_delay": "250ms", "max_delay": "20s"}
_STALLED = 30  # seconds after which a request without an answer is sent a second time
_LONGEST = 180  # seconds after which it is an error that neither is answered
_POLL = 0.1
_PARTS, _PART = 8, 1 << 23  # of an object that is copied: how many at a time, and their bytes
_DRIVERS = {"gs": "gcs", "s3": "s3"}

Range = tuple[str, int, int]  # path, first byte, number of bytes


class Ranges:
    """Reads parts of files. A file in a bucket that is replaced between two reads is an error: what
    is known of where its records are no longer holds. Can be used by any number of threads.
    """

    def __init__(self):
        self._generations: dict[str, bytes] = {}

    def __reduce__(self):
        return Ranges, ()

    def read(self, path: str, first: int, size: int) -> bytes:
        """`size` bytes of a file from byte `first`.

        Raises:
          DataError: it is missing, has changed, is shorter, or cannot be read.
        """
        return self.read_many([(path, first, size)])[0]

    def read_many(self, wanted: Sequence[Range]) -> list[bytes]:
        """The bytes of several ranges, which are read at the same time; for `Raises` see `read`."""
        if not any(places.in_bucket(path) for path, _, _ in wanted):
            return [_read_local(*part) for part in wanted]
        requests = [_request(path, slice(first, first + size)) for path, first, size in wanted]
        return [
            self._content(path, request)
            for (path, _, _), request in zip(wanted, requests, strict=True)
        ]

    def _content(self, path: str, request: Callable) -> bytes:
        try:
            reply = request()
        except FileNotFoundError:
            raise DataError(f"{path} is missing") from None
        seen = self._generations.setdefault(path, reply.stamp.generation)
        if seen != reply.stamp.generation:
            raise DataError(
                f"{path} was replaced while it was being read. A data set must not change during a run: "
                "start again to read the new one"
            )
        return reply.value


def read_files(paths: Sequence[str]) -> list[bytes | BadImage]:
    """The content of files that are one image each, read at the same time; or why one cannot be read.

    Raises:
      DataError: a bucket cannot be read.
    """
    requests = [_request(path) if places.in_bucket(path) else None for path in paths]

    def content(path: str, request: Callable | None) -> bytes | BadImage:
        name = readable(path)
        try:
            if request is None:
                return images.read_file(path, name)
            content = request().value
            images.check_bytes(len(content), name)
            return content
        except FileNotFoundError:
            return BadImage(name, "there is no such file")
        except BadImage as error:
            return error

    return [content(*pair) for pair in zip(paths, requests, strict=True)]


def copy(path: str, size: int, target: pathlib.Path) -> None:
    """Copies an object of `size` bytes to a local file, several parts at a time.

    Raises:
      DataError: it is missing, has changed, or cannot be read.
    """
    reader = Ranges()
    with open(target, "wb") as file:
        for first in range(0, size, _PARTS * _PART):
            starts = range(first, min(first + _PARTS * _PART, size), _PART)
            parts = [(path, start, min(_PART, size - start)) for start in starts]
            file.writelines(reader.read_many(parts))


class RangeFile(io.RawIOBase):
    """An object of a bucket as a file for those who hop from header to header: what is between two is
    read too unless it is large, since reading it takes less time than another request.
    """

    _WINDOW = 1 << 22

    def __init__(self, file: places.File):
        super().__init__()
        self._file, self._place, self._ranges = file, 0, Ranges()
        self._first, self._content = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {0: 0, 1: self._place, 2: self._file.size}[whence]
        return self._place

    def read(self, size: int = -1) -> bytes:
        left = max(self._file.size - self._place, 0)
        size = left if size < 0 else min(size, left)
        within = self._place - self._first
        if size and not 0 <= within <= len(self._content) - size:
            wanted = min(max(size, self._WINDOW), left)
            self._content = self._ranges.read(self._file.path, self._place, wanted)
            self._first, within = self._place, 0
        self._place += size
        return self._content[within : within + size]


def open_to_scan(file: places.File) -> BinaryIO:
    """Opens a file whose headers, with much between them, are to be read."""
    return RangeFile(file) if places.in_bucket(file.path) else places.open_bytes(file.path)


def list_objects(folder: str) -> list[tuple[str, int]]:
    """All objects below a folder of a bucket, by one listing: the name relative to the folder, and a number
    (64 bits) that differs where the content does.

    Raises:
      DataError: the bucket cannot be listed.
    """
    address = folder.rstrip("/") + "/"
    start = len(buckets.parts(address)[2])
    try:
        return [
            (name[start:], fingerprint.number(content))
            for name, content in buckets.objects(address)
        ]
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        raise DataError(f"{folder} cannot be listed: {buckets.reason(error)}") from None


def in_parallel(function: Callable, items: Sequence, threads: int = 64) -> list:
    """`function` of each item, in order, by threads that mostly wait for a bucket."""
    if len(items) < 2:
        return list(map(function, items))
    with concurrent.futures.ThreadPoolExecutor(min(threads, len(items))) as pool:
        return list(pool.map(function, items))


def _read_local(path: str, first: int = 0, size: int = -1) -> bytes:
    with places.open_bytes(path) as file:
        if first:
            file.seek(first)
        return file.read(size)


def _request(path: str, part: slice | None = None) -> Callable:
    """Starts to read an object, or a part of it; returns a function that waits for the reply."""
    places.last_opened[threading.current_thread().name] = path
    scheme, bucket, name = buckets.parts(path)
    wanted = {} if part is None else {"byte_range": part}
    start = functools.partial(_store(scheme, bucket).read, name, **wanted)
    pending = [start()]

    def reply():
        give_up = time.monotonic() + _LONGEST
        while time.monotonic() < give_up:
            for request in pending:
                with contextlib.suppress(TimeoutError):
                    return _found(path, request, _STALLED if len(pending) == 1 else _POLL)
            if len(pending) == 1:
                pending.append(start())
        raise DataError(f"{path} cannot be read: no answer for {_LONGEST} s")

    return reply


def _found(path: str, request, timeout: float):
    try:
        result = request.result(timeout=timeout)
    except ValueError as error:  # TensorStore's for whatever lasts
        raise DataError(f"{path} cannot be read: {_reason(error)}") from None
    if result.state == "missing":
        raise FileNotFoundError(path)
    return result


def _reason(error: ValueError) -> str:
    """TensorStore's message without what only its developers can use."""
    return str(error).split(" [")[0].split("\n")[0]


@functools.lru_cache(64)
def _store(scheme: str, bucket: str):
    import tensorstore as ts  # slow to import

    driver = _DRIVERS[scheme]
    context = {
        f"{driver}_request_concurrency": {"limit": CONCURRENCY},
        f"{driver}_request_retries": _RETRIES,
    }
    spec = {"driver": driver, "bucket": bucket, "context": context}
    if driver == "s3" and (endpoint := os.environ.get("AWS_ENDPOINT_URL")):
        region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
        spec |= {"endpoint": endpoint, "aws_region": region or "us-east-1"}
    return ts.KvStore.open(spec).result()
