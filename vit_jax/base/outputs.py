"""Where commands write: the folders and files that flags name, checked before anything is computed. Files and folders
appear under their names when they are whole; what a process that was killed left of one is removed when the same name
is written again.
"""

import contextlib
import os
import pathlib
import re
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError

TERMINATED = 128 + signal.SIGTERM


def make_folder(path: epath.PathLike, flag: str) -> epath.Path:
    """The folder that a flag names, made if it is not there.

    Raises:
      ConfigError: it cannot be made.
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
    return folder


def check_no_file(folder: epath.Path, flag: str) -> None:
    """Raises `ConfigError` if a place for a folder, or one above it, is a file or an object."""
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
    """The file that a flag names, of which the folder is there.

    Raises:
      ConfigError: the folder is not there, or cannot be written to.
    """
    file = places.locate(path, flag)
    if places.in_bucket(file):
        return file
    folder = os.path.dirname(file)
    if not os.path.isdir(folder):
        raise ConfigError(f"{flag}={path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag}={path}: {folder} cannot be written to")
    return file


@contextlib.contextmanager
def writing(file: epath.Path) -> Iterator[pathlib.Path]:
    """A local path to write a file at, in one go or in parts; it appears as `file` when the block ends
    without an error.
    """
    if places.in_bucket(file):
        with tempfile.TemporaryDirectory() as folder:
            partial = pathlib.Path(folder) / file.name
            yield partial
            places.upload(partial, file)
        return
    with written_whole(file) as partial:
        yield pathlib.Path(partial)


def as_cell(value: Any) -> Any:
    """A cell of a CSV file that no spreadsheet runs as a formula: text that begins like one gets an apostrophe before
    it.
    """
    formula = isinstance(value, str) and value.startswith(("=", "+", "-", "@", "\t", "\r"))
    return f"'{value}" if formula else value


def partial_path(path: epath.PathLike) -> epath.Path:
    """Where to write what gets the name `path` when it is whole."""
    path = epath.Path(path)
    _remove_left_over(path)
    return path.parent / f".{path.name}.partial-{os.getpid()}"


@contextlib.contextmanager
def written_whole(path: epath.PathLike) -> Iterator[epath.Path]:
    """`with written_whole(path) as partial:` a file to write; after an error or SIGTERM nothing stays of it."""
    partial = partial_path(path)
    with ended_by_sigterm():
        try:
            yield partial
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the process as an exception does, so that what is half written is removed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _remove_left_over(path: epath.Path) -> None:
    """Removes what processes that are gone left beside a local `path`."""
    folder = os.fspath(path.parent)
    if not os.path.isdir(folder):
        return
    for name in os.listdir(folder):
        match = re.fullmatch(re.escape(f".{path.name}.partial-") + r"(\d+)", name)
        if match and not os.path.exists(f"/proc/{match[1]}"):
            left = os.path.join(folder, name)
            shutil.rmtree(left) if os.path.isdir(left) else os.unlink(left)
