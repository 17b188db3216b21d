"""Where the records of files in a bucket are, kept between starts: finding it out takes a request for
each few records, reading what was found takes one.

The first start stores it beside the files, as `INDEX`, or, where it may not write there, in the cache
on this machine (XDG_CACHE_HOME, or ~/.cache). What is stored is verified by one listing: a file whose
size or generation (S3: ETag) differs, or that is new, is read again, and a log line says so. Files on
a disk are read at each start.
"""

import hashlib
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence

import msgpack
from absl import logging
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.data.record import DataError
from vit_jax.data.sources.ranges import in_parallel

INDEX = "vit_jax.index"
_FORMAT = 1
_THREADS = 64
_SECONDS = 30  # between lines of the log
_NAMES = {"unicode_errors": "surrogateescape"}  # names inside tar files may be any bytes


def scan_all(paths: Sequence[str], scan: Callable[[places.File], object], kind: str) -> list:
    """`scan` of each of `paths`, files in one folder, or what is stored of it.

    Args:
      paths: of files that are there.
      scan: finds out where the records of a file are; gives numbers, bytes, texts, and lists and
        dictionaries of these.
      kind: of the files and of the version of `scan`, 'tar 1': another kind is not used.

    Raises:
      DataError: a file is missing, or cannot be read.
    """
    if not paths or not places.in_bucket(paths[0]):
        return in_parallel(lambda path: scan(places.describe_file(path)), paths, os.cpu_count())
    folder = os.path.dirname(paths[0])
    files = {file.path: file for file in places.files_below(folder)}
    if gone := [path for path in paths if path not in files]:
        raise DataError(f"{gone[0]} is missing")
    stored = _load(folder, kind)
    known = {
        path: entry
        for path in files
        if (entry := stored.get(os.path.basename(path))) and _same(entry, files[path])
    }
    missing = [path for path in paths if path not in known]
    if missing:
        changed = sum(os.path.basename(path) in stored for path in missing)
        logging.info(
            "%s: finding the records of %d of %d files%s; the result is stored in %s",
            folder, len(missing), len(paths), f" ({changed} have changed)" if changed else "", INDEX,
        )  # fmt: skip
        scan = _with_log(scan, folder, len(missing))
        found = in_parallel(lambda path: scan(files[path]), missing, _THREADS)
        for path, value in zip(missing, found, strict=True):
            file = files[path]
            known[path] = {"size": file.size, "identity": file.identity, "value": value}
        _store(folder, kind, known)
    return [known[path]["value"] for path in paths]


def _same(entry: Mapping, file: places.File) -> bool:
    return (entry["size"], entry["identity"]) == (file.size, file.identity)


def _with_log(scan: Callable, folder: str, total: int) -> Callable:
    """`scan`, which now and then logs how far it is."""
    start, state, lock = time.monotonic(), {"done": 0, "logged": time.monotonic()}, threading.Lock()

    def scan_and_log(file: places.File):
        value = scan(file)
        with lock:
            state["done"] += 1
            now = time.monotonic()
            if now - state["logged"] > _SECONDS:
                state["logged"] = now
                left = (now - start) * (total / state["done"] - 1)
                logging.info(
                    "%s: %d of %d files, about %.0f min left",
                    folder,
                    state["done"],
                    total,
                    left / 60,
                )
        return value

    return scan_and_log


def _load(folder: str, kind: str) -> dict:
    """Name of a file → what is stored of it; nothing where nothing usable is stored."""
    for place in _places(folder):
        try:
            content = places.read_bytes(place)
        except FileNotFoundError:
            continue
        try:
            index = msgpack.unpackb(zlib.decompress(content), use_list=False, **_NAMES)
        except (zlib.error, ValueError, msgpack.UnpackException) as error:
            logging.warning("%s is damaged (%s) and is made again", place, error)
            continue
        if isinstance(index, dict) and index.get("format") == (_FORMAT, kind):
            return index["files"]
    return {}


def _store(folder: str, kind: str, known: Mapping[str, Mapping]) -> None:
    index = {
        "format": [_FORMAT, kind],
        "files": {os.path.basename(path): known[path] for path in sorted(known)},
    }
    content = zlib.compress(msgpack.packb(index, **_NAMES), 1)
    beside, cached = _places(folder)
    try:
        places.write_whole(beside, content)
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        logging.warning(
            "%s cannot be written (%s): the index is stored in %s, on this machine alone",
            beside, buckets.reason(error), cached,
        )  # fmt: skip
        cached.parent.mkdir(parents=True, exist_ok=True)
        places.write_whole(cached, content)


def _places(folder: str) -> tuple[epath.Path, epath.Path]:
    """Where an index may be: beside the files, and in the cache of this machine."""
    cache = epath.Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    name = hashlib.sha256(folder.encode()).hexdigest()[:32]
    return epath.Path(folder) / INDEX, cache / "vit_jax" / "indices" / name
