"""Where files may be: in a local folder, or in a bucket of Google Cloud Storage (`gs://`)."""

import difflib
import importlib.util
import json
import os
import threading
from typing import BinaryIO

from absl import logging
from etils import epath

from vit_jax.base.errors import ConfigError


def locate(path: epath.PathLike) -> epath.Path:
    """The path that a user gave: a local one absolute, with `~` expanded; a bucket's as it is.

    Raises:
      ConfigError: it is in a bucket, and the package that reads buckets is not installed.
    """
    path = epath.Path(path).expanduser()
    if not in_bucket(path):
        return path.absolute()
    if importlib.util.find_spec("gcsfs") is None:
        raise ConfigError(f"{path}: reading buckets needs gcsfs: pip install 'vit_jax[gcs]'")
    return path


def absolute(path: str) -> str:
    """A path that means the same from every folder: a local one absolute, with `~` expanded; a
    bucket's, and an empty one, as it is.
    """
    if not path or in_bucket(path):
        return path
    place = epath.Path(path).expanduser()
    return str(place.resolve() if ".." in place.parts else place.absolute())


def local_folder(path: str, name: str) -> str:
    """The absolute path of a folder on this machine's disks; '' as it is.

    Raises:
      ConfigError: it is in a bucket.
    """
    if in_bucket(path):
        raise ConfigError(f"{name} = {path!r} is in a bucket: set it to a folder on a local disk")
    return absolute(path)


def nearest_existing(path: epath.PathLike) -> str:
    """'; did you mean …?' with the file or folder beside `path` whose name is most like its own, or
    ''.
    """
    folder, name = os.path.split(os.path.abspath(os.path.expanduser(path)))
    there = os.listdir(folder) if os.path.isdir(folder) else []
    close = difflib.get_close_matches(name, there, n=1)
    return f"; did you mean {os.path.join(os.path.dirname(path), close[0])!r}?" if close else ""


def make_folder(path: epath.PathLike, flag: str) -> epath.Path:
    """The folder that a flag names, made if it is not there.

    Raises:
      ConfigError: it cannot be made.
    """
    folder = locate(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{flag}={folder}: the folder cannot be made ({error.strerror})"
        ) from None
    return folder


def check_folder_of(path: epath.PathLike, flag: str) -> None:
    """Raises `ConfigError` unless there is a folder to write the file in that a flag names."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"{flag}={path}: there is no folder {folder}")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{flag}={path}: {folder} cannot be written to")


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file so that readers never see a part of it, whatever happens to the writer."""
    if isinstance(content, str):
        content = content.encode()
    if in_bucket(path):
        path.write_bytes(content)
        return
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else the name may reach the disk before the content
    new.replace(path)


def read_json(path: epath.Path, kind: type = dict):
    """The content of a small JSON file beside a run; `None` if it is missing or unusable. The
    latter is logged and never stops a run.

    Args:
      kind: what must be in it, `dict` or `list`.
    """
    if not path.exists():
        return None
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        logging.warning("%s cannot be read (%s): going on without it", path, error)
        return None
    if not isinstance(value, kind):
        logging.warning("%s holds no %s: going on without it", path, kind.__name__)
        return None
    return value


# The file that each thread, by name, opened last: what a run that hangs may be waiting for.
last_opened: dict[str, str] = {}


def open_bytes(path: str) -> BinaryIO:
    """Opens a file to read; a local one without the cost of a path object, which readers of many
    small files would feel.
    """
    last_opened[threading.current_thread().name] = path
    return epath.Path(path).open("rb") if in_bucket(path) else open(path, "rb")


def in_bucket(path: epath.PathLike) -> bool:
    """Whether a path is a bucket's: there files appear whole, and nothing can be appended to them."""
    return "://" in os.fspath(path)
