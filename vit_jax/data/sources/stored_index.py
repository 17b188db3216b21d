"""Where the records of files are, kept between starts: finding it out takes a read for each few records, opening what
was found takes none.

It lies beside the files as `INDEX`, made by `vit_jax prepare` or at the first start, by one process while the others
wait. What is in a bucket or on a mount is read once a machine, into its cache (XDG_CACHE_HOME, or ~/.cache), where all
processes map the same file. Where nobody may write beside the files, the cache has the only copy. It is compared with
the files' sizes and generations (S3: ETags; on disks the times of their last changes): what differs, or is new, is read
again, and a log line says so.
"""

import contextlib
import dataclasses
import hashlib
import math
import os
import pathlib
import shutil
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgpack
from absl import logging
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import UserError
from vit_jax.base.lock import Lock
from vit_jax.data.record import DataError
from vit_jax.data.sources.columns import (
    NAMES,
    DamagedIndex,
    FileColumns,
    Index,
    name_in,
    open_index,
)
from vit_jax.data.sources.ranges import copy, in_parallel

INDEX = "vit_jax.index"
_SMALL = 1 << 25  # bytes of files on a disk that are read at each start: that takes moments
_FEW = 16  # files of a bucket that are asked for one by one instead of listing their folder
_THREADS = 64
_SECONDS = 30  # between lines of the log


@dataclasses.dataclass(frozen=True)
class Kind:
    """A kind of files of records.

    Attributes:
      name: of it and of the version of `scan`: an index of another is not used.
      scan: finds out where the records of a file are.
      earlier: the names under which earlier versions stored something else → what makes columns of that.
      doing: what the log calls a scan.
    """

    name: str
    scan: Callable[[places.File], FileColumns]
    earlier: Mapping[str, Callable[[Any], FileColumns]] = dataclasses.field(default_factory=dict)
    doing: str = "finding the records of"


def find_records(
    paths: Sequence[str],
    kind: Kind,
    sizes: Mapping[str, int] | None = None,
    folder: str = "",
) -> Index:
    """Where the records of `paths` are; read from them only if no stored index says it.

    Args:
      sizes: path → the bytes that the file must have, where that is known.
      folder: where the index is stored; '': in the innermost that all files are in.

    Raises:
      DataError: a file is missing, has another size, or cannot be read.
    """
    files = _describe(paths, sizes)
    on_disk = not places.in_bucket(paths[0])
    if on_disk and sum(file.size for file in files) < _SMALL:
        parts = dict(zip(files, _scan(kind, files), strict=True))
        return Index.of(kind.name, parts, folder or _folder_of(paths))
    store = _Store(folder or _folder_of(paths), kind)
    # Without a lock first: usually it is there.
    return store.look(files) or store.make(files)


def store_index(paths: Sequence[str], kind: Kind, sizes: Mapping[str, int] | None = None) -> Index:
    """As `find_records`, but the index is beside the files afterwards, however few they are.

    Raises:
      UserError: it cannot be written there.
    """
    store = _Store(_folder_of(paths), kind)
    return store.make(_describe(paths, sizes), in_folder=True)


def _folder_of(paths: Sequence[str]) -> str:
    """The folder that all files are in, or in its folders."""
    folder = os.path.dirname(paths[0])
    while not all(path.startswith(f"{folder}/") for path in paths) and folder.strip("/"):
        folder = os.path.dirname(folder)
    return folder


def _describe(paths: Sequence[str], sizes: Mapping[str, int] | None) -> list[places.File]:
    """The files as storage describes them, which have the `sizes` that are known."""
    files = _list(paths)
    for file in files:
        if sizes and file.size != sizes.get(file.path, file.size):
            raise DataError(
                f"{file.path} has {file.size} bytes, there should be {sizes[file.path]}: it is not the file that was "
                "prepared, or not all of it"
            )
    return files


def _list(paths: Sequence[str]) -> list[places.File]:
    """The files as storage describes them, those of a bucket by one listing."""
    if places.in_bucket(paths[0]) and len(paths) > _FEW:
        listed = {file.path: file for file in places.files_below(_folder_of(paths))}
        if gone := next((path for path in paths if path not in listed), None):
            raise DataError(f"{gone} is missing")
        return [listed[path] for path in paths]

    def describe(some: Sequence[str]) -> list[places.File]:
        return [_describe_one(path) for path in some]

    # Mounts take a while for each.
    size = max(len(paths) // _THREADS, 1 if places.in_bucket(paths[0]) else 256)
    parts = [paths[first : first + size] for first in range(0, len(paths), size)]
    return [file for part in in_parallel(describe, parts) for file in part]


def _describe_one(path: str) -> places.File:
    try:
        return places.describe_file(path)
    except FileNotFoundError:
        raise DataError(f"{path} is missing") from None


class _Store:
    """The index of the files in a folder."""

    def __init__(self, folder: str, kind: Kind):
        self._written, self._kind = folder, kind
        folder = folder if places.in_bucket(folder) else os.path.abspath(folder)
        self._folder = epath.Path(folder)
        self._beside = self._folder / INDEX
        self._cached = _cache_folder() / hashlib.sha256(folder.encode()).hexdigest()[:32]
        self._new = self._cached.with_name(f"{self._cached.name}.new")
        self._near = not places.is_remote(folder)  # what is mapped into memory has to be
        self._copied = None  # what is beside the files, as it was copied to `new`

    def look(self, files: Sequence[places.File]) -> Index | None:
        """The index on this machine, if it knows all `files`."""
        near = [pathlib.Path(self._beside)] if self._near else []
        indices = filter(None, (self._open(path) for path in [*near, self._cached]))
        usable = (index for index in indices if index.is_stored and _knows(index, files))
        return next(usable, None)

    def make(self, files: Sequence[places.File], *, in_folder: bool = False) -> Index:
        """The index of `files`, made if it is not there: by one process, while others wait.

        Args:
          in_folder: whether it has to be stored beside the files.
        """
        with _alone(epath.Path(self._cached.parent), f"{self._cached.name}.lock"):
            if not in_folder and (index := self.look(files)):
                return index
            if index := self._take(files):
                return index
            with _alone(self._folder, f".{INDEX}.lock"):  # of all machines
                return self._take(files) or self._make(files, in_folder)

    def _take(self, files: Sequence[places.File]) -> Index | None:
        """The index beside the files, if it knows all of them; then it is on this machine, too."""
        path = self._copy()
        index = path and self._open(path, verify=not self._near)
        if not index or not index.is_stored or not _knows(index, files):
            return None
        if not self._near:
            self._new.replace(self._cached)
            self._copied = None
        return index

    def _copy(self) -> pathlib.Path | None:
        """What is beside the files, copied unless it is near; `None` if nothing is."""
        if self._near:
            return pathlib.Path(self._beside)
        try:
            file = places.describe_file(self._beside)
            if file != self._copied:
                if places.in_bucket(self._beside):
                    copy(file.path, file.size, self._new)
                else:
                    shutil.copyfile(file.path, self._new)
        except FileNotFoundError:
            return None
        self._copied = file
        return self._new if self._new.exists() else None  # else it is damaged

    def _open(self, path: pathlib.Path, *, verify: bool = False) -> Index | None:
        """What is stored at `path`, if it can be used."""
        try:
            index = open_index(path, verify=verify)
            index.folder = self._written
            return index if index.kind == self._kind.name else None
        except FileNotFoundError:
            return None
        except DamagedIndex as error:
            index = _earlier_index(path.read_bytes(), self._kind)
            if index is None:
                if path == self._new:
                    path.unlink()
                    path = self._beside
                logging.warning("%s is damaged (%s) and is made again", path, error)
                return None
            index.folder = self._written
            return index

    def _make(self, files: Sequence[places.File], in_folder: bool) -> Index:
        names = {name_in(self._written, file.path): file for file in files}
        present = names.keys() | set(places.names_in(self._folder))
        known: dict[str, tuple[places.File, FileColumns]] = {}
        stored, changed = 0, set()
        for path in filter(None, (self._cached, self._copy())):
            index = self._open(path)
            for number, (name, file) in enumerate(index.files.items() if index else ()):
                stored += 1
                if name in names and not index.has(names[name]):
                    changed.add(name)
                elif name in present:
                    known[name] = file, index.part(number)
        missing = {name: file for name, file in names.items() if name not in known}
        changed &= missing.keys()  # another index may know the file as it is
        differ = f" ({len(changed)} have changed)" if changed else ""
        if stored and not changed and not known:
            differ = f" ({INDEX} is of other files)"
        logging.info(
            "%s: %s %d of %d files%s; the result is stored in %s",
            self._folder, self._kind.doing, len(missing), len(files), differ, INDEX,
        )  # fmt: skip
        scanned = _scan(self._kind, list(missing.values()), str(self._folder))
        known |= zip(missing, zip(missing.values(), scanned, strict=True), strict=True)
        ordered = dict(known[name] for name in sorted(known))
        self._publish(Index.of(self._kind.name, ordered, self._written), in_folder)
        index = self.look(files)
        assert index, "what was just stored is there"
        return index

    def _publish(self, index: Index, in_folder: bool) -> None:
        """Stores an index beside the files and on this machine."""
        index.write(self._new)
        self._copied = None
        try:
            places.upload(self._new, self._beside)
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            why = buckets.reason(error)
            if in_folder:
                raise UserError(f"{self._beside} cannot be written: {why}") from None
            logging.warning(
                "%s cannot be written (%s): the index is stored in %s, on this machine alone",
                self._beside, why, self._cached,
            )  # fmt: skip
        else:
            if self._near:
                self._new.unlink()
                self._cached.unlink(missing_ok=True)
                return
        self._new.replace(self._cached)


def _knows(index: Index, files: Sequence[places.File]) -> bool:
    return all(map(index.has, files))


def _earlier_index(content: bytes, kind: Kind) -> Index | None:
    """What an earlier version has stored; `None` if it is something else."""
    try:
        stored = msgpack.unpackb(zlib.decompress(content), use_list=False, **NAMES)
        convert = kind.earlier[stored["format"][1]]
        return Index.of(
            kind.name,
            {
                places.File(name, entry["size"], entry["identity"]): convert(entry["value"])
                for name, entry in stored["files"].items()
            },
        )
    except (zlib.error, ValueError, TypeError, KeyError, msgpack.UnpackException):
        return None


def _scan(kind: Kind, files: Sequence[places.File], folder: str = "") -> list[FileColumns]:
    """What is found in each file; of a `folder` it is logged now and then how far that is."""
    if not files:
        return []
    scan = _with_log(kind.scan, folder, len(files)) if folder else kind.scan
    return in_parallel(scan, files, _THREADS if places.in_bucket(files[0].path) else os.cpu_count())


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


@contextlib.contextmanager
def _alone(folder: epath.Path, name: str) -> Iterator[None]:
    """Inside, no other process is; others wait. Where nobody may write, all are inside at once."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(Lock(folder, name=name, patience=math.inf))
            if not places.in_bucket(folder):  # whose locks go by themselves
                stack.callback((folder / name).unlink, missing_ok=True)
        except Exception as error:
            if not buckets.is_failure(error):
                raise
        yield


def _cache_folder() -> pathlib.Path:
    """The folder of this machine's copies, made if it is not there.

    Raises:
      UserError: there is no place for it.
    """
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if not home.startswith("~"):
        folder = pathlib.Path(home) / "vit_jax" / "indices"
        with contextlib.suppress(OSError):  # a container whose user has no home
            folder.mkdir(parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    instead = pathlib.Path(tempfile.gettempdir()) / f"vit_jax-indices-{os.getuid()}"
    instead.mkdir(mode=0o700, exist_ok=True)
    about = instead.lstat()
    if about.st_uid != os.getuid() or about.st_mode & 0o077:
        raise UserError(
            f"{folder} cannot be written, and {instead} is somebody else's: set XDG_CACHE_HOME to a folder"
        )
    return instead
