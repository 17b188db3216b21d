"""The output of commands: the folders and files that flags name are checked before anything is computed. Files and
folders appear under their names when they are complete. The remains of one, left by a process that was killed, are
removed when the same name is written again.
"""

import contextlib
import errno
import os
import pathlib
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError

TERMINATED = 128 + signal.SIGTERM
FORMULAS = ("=", "+", "-", "@", "\t", "\r")  # the beginnings of text that spreadsheets compute
_NUMBER = re.compile(r"[+-]?\d+(\.\d+)?")


def make_folder(path: epath.PathLike, flag: str) -> epath.Path:
    """The folder that a flag names, made if it is not there.

    Raises:
      ConfigError: it cannot be made, or written to.
    """
    folder = places.locate(path, flag)
    check_no_file(folder, flag)
    if places.in_bucket(folder):  # Folders exist there only in the names of objects.
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag}={folder}: the folder cannot be made ({error.strerror})"
        ) from None
    _check_writable(folder, f"{flag}={folder}")
    return folder


def check_can_be_made(folder: epath.PathLike) -> None:
    """Raises `OSError` if a local folder is not there and cannot be made, or files cannot be written in it. Nothing
    is made, and no name appears in it.
    """
    place = os.path.abspath(folder)
    while not _is_folder(place):
        place = os.path.dirname(place)
    # Permissions do not tell: root has all of them, and still cannot write to /proc or to a full disk.
    with tempfile.TemporaryFile(dir=place, buffering=0) as probe:
        probe.write(bytes(4096))


def _is_folder(place: str) -> bool:
    """Whether there is a folder; raises `OSError` if there is something else, or a folder cannot be there."""
    try:
        mode = os.stat(place).st_mode
    except FileNotFoundError:
        if os.path.islink(place):
            raise
        return False
    if not stat.S_ISDIR(mode):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), place)
    return True


def _check_writable(folder: epath.PathLike, named: str) -> None:
    try:
        check_can_be_made(folder)
    except OSError as error:
        raise ConfigError(f"{named}: {folder} cannot be written to ({error.strerror})") from None


def check_no_file(folder: epath.Path, flag: str) -> None:
    """Raises `ConfigError` if the path of a folder, or of one above it, is that of a file or an object."""
    for place in (folder, *folder.parents):
        if places.in_bucket(place) and not buckets.parts(str(place))[2]:
            return
        if place.is_file():
            kind = "an object" if places.in_bucket(place) else "a file"
            raise ConfigError(
                f"{flag}={folder}: {place} is {kind}, not a folder: choose another name"
            )
        if not places.in_bucket(place) and place.exists():
            return


def file_to_write(path: epath.PathLike, flag: str) -> epath.Path:
    """The path of a file that a flag names, in a folder that exists.

    Raises:
      ConfigError: the folder does not exist or cannot be written to, or the path belongs to a folder or a device.
    """
    file = places.locate(path, flag)
    if places.in_bucket(file):
        return file
    folder = os.path.dirname(file)
    if not os.path.isdir(folder):
        raise ConfigError(f"{flag}={path}: there is no folder {folder}")
    if os.path.isdir(file):
        raise ConfigError(f"{flag}={path} is a folder: name a file in it")
    check_replaceable(file, f"{flag}={path}")
    return file


def check_replaceable(path: epath.Path, named: str) -> None:
    """Checks the local path of a file or folder that will be made; the folders above it need not exist yet.

    Args:
      named: its name in messages.

    Raises:
      ConfigError: a device or a pipe is there, which would be replaced, or nothing can be written there.
    """
    if os.path.exists(path) and not (os.path.isfile(path) or os.path.isdir(path)):
        raise ConfigError(f"{named} is a device or a pipe: choose another name")
    _check_writable(path.parent, named)


@contextlib.contextmanager
def writing(file: epath.Path, *, swept: bool = False) -> Iterator[pathlib.Path]:
    """A local path to write a file at, in one go or in parts; it appears as `file` when the block ends
    without an error. `swept`: see `partial_path`.
    """
    if places.in_bucket(file):
        with tempfile.TemporaryDirectory() as folder:
            partial = pathlib.Path(folder) / file.name
            yield partial
            places.upload(partial, file)
        return
    with written_whole(file, swept=swept) as partial:
        yield pathlib.Path(partial)


def as_cell(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet runs as a formula: text that begins like one gets an apostrophe before
    it. Numbers such as '-1' and a sign alone are none.
    """
    if not isinstance(value, str) or len(value) == 1 or _NUMBER.fullmatch(value):
        return value
    return f"'{value}" if value.startswith(FORMULAS) else value


def partial_path(path: epath.PathLike, *, swept: bool = False) -> epath.Path:
    """The path to write a file or folder at that is called `path` when it is whole.

    Args:
      swept: the caller has called `remove_left_overs` of the folder; if not, the folder is listed here, which takes
        long for each of many files.
    """
    path = epath.Path(path)
    if not swept:
        remove_left_overs(path.parent, re.escape(path.name))
    return path.parent / f".{path.name}.partial-{os.getpid()}"


@contextlib.contextmanager
def written_whole(path: epath.PathLike, *, swept: bool = False) -> Iterator[epath.Path]:
    """`with written_whole(path) as partial:` a file to write; after an error or SIGTERM nothing stays of it. `swept`:
    see `partial_path`.
    """
    partial = partial_path(path, swept=swept)
    with ended_by_sigterm():
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does, so that incomplete files are removed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def remove_left_overs(folder: epath.PathLike, names: str = ".*") -> None:
    """Removes the files and folders in a local folder that were being written by processes that are gone.

    Args:
      names: a regular expression of the names that these were to get; by default any.
    """
    folder = os.fspath(folder)
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        match = re.fullmatch(rf"\.{names}\.partial-(\d+)", name, re.DOTALL)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            left = os.path.join(folder, name)
            if os.path.isdir(left):
                shutil.rmtree(left)
            else:
                os.unlink(left)
