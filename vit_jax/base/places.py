"""Paths of files in a local folder, or in a bucket of Google Cloud Storage (`gs://`) or S3 (`s3://`). No other module
interprets paths; the clients of buckets are in `buckets`.

Users give paths, `file://` addresses and addresses of buckets. `locate` comes first, and raises `ConfigError` for an
address that cannot be used; the other functions take the path that it returns.
"""

import contextlib
import dataclasses
import difflib
import errno
import glob
import json
import math
import os
import re
import shutil
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, BinaryIO

# epath would use TensorFlow for buckets wherever it is installed, and import it.
os.environ.setdefault("EPATH_USE_TF", "false")

from absl import logging  # noqa: E402
from etils import epath  # noqa: E402

from vit_jax.base import buckets  # noqa: E402
from vit_jax.base.errors import ConfigError  # noqa: E402

_BUCKETS = ("gs://", "s3://")
_ADDRESS = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
# Types of file systems with files on other machines: mounted buckets (FUSE) and network file systems.
_REMOTE = re.compile(r"fuse(?!ctl|blk).*|nfs\d?|cifs|smb3|lustre|gpfs|ceph|beegfs|9p|afs|virtiofs")
_ONE_SLASH = re.compile(r"(gs|s3|https?):/(?!/)")  # of an address that a path object has shortened


@dataclasses.dataclass(frozen=True)
class File:
    """A file as storage describes it.

    Attributes:
      path: its path or address.
      size: bytes.
      identity: a text that changes when the content does: an object's generation or ETag, a local
        file's size and time.
    """

    path: str
    size: int
    identity: str


def locate(path: epath.PathLike, field: str = "", *, instead: str = "") -> epath.Path:
    """The path that a user gave: a local one absolute, with `~` expanded; a bucket's as it is, once
    the bucket has answered.

    Args:
      field: the flag or config field that names it, for messages.
      instead: advice for the message, where only a local path will do; '': a bucket will do too.

    Raises:
      ConfigError: it is neither local nor in a bucket, or it is in a bucket which does not exist, for
        which there is no package, permission or credentials, or which will not do here.
      buckets.Unreachable: the bucket does not answer.
    """
    field = f"{field}=" if field else ""
    text = _resolved(os.fspath(path), field)
    if not in_bucket(text):
        return expanded(text, field).absolute()
    if instead:
        raise ConfigError(f"{field}{text}: must be a local path: {instead}")
    buckets.check_name(text, field)
    buckets.check_reachable(text, field)
    return epath.Path(text)


def expanded(path: epath.PathLike, field: str = "") -> epath.Path:
    """A local path with `~` expanded.

    Args:
      field: the flag or config field with '=', for messages.

    Raises:
      ConfigError: the user's home folder is not known. Python would make a folder that is called `~`.
    """
    text = os.path.expanduser(os.fspath(path))
    if text.partition("/")[0].startswith("~"):
        raise ConfigError(
            f"{field}{text}: the home folder is not known, for HOME is not set and this user has no entry in the "
            "system's list: set HOME, or an absolute path"
        )
    return epath.Path(text)


def has_home() -> bool:
    """Whether the user's home folder is known."""
    return not os.path.expanduser("~").startswith("~")


def absolute(path: str, field: str = "") -> str:
    """A path that means the same from every folder: a local one absolute, with `~` expanded; a
    bucket's, and an empty one, as it is.

    Raises:
      ConfigError: it is neither local nor in a bucket.
    """
    if not path:
        return path
    field = f"{field}=" if field else ""
    path = _resolved(path, field)
    if in_bucket(path):
        return path
    place = expanded(path, field)
    return str(place.resolve() if ".." in place.parts else place.absolute())


def local_folder(path: str, name: str) -> str:
    """The absolute path of a folder on this machine's disks; '' as it is.

    Raises:
      ConfigError: it is in a bucket.
    """
    if in_bucket(path):
        raise ConfigError(f"{name} = {path!r} is in a bucket: set it to a folder on a local disk")
    return absolute(path, name)


def _resolved(text: str, field: str) -> str:
    """A local path or an address in a bucket."""
    scheme = _ADDRESS.match(text)
    if text.startswith("file:/"):
        return _of_file_address(text, field)
    if _ONE_SLASH.match(text):
        raise ConfigError(
            f"{field}{text}: an address has two slashes: {text.replace(':/', '://', 1)}"
        )
    if scheme and not text.startswith(_BUCKETS):
        raise ConfigError(
            f"{field}{text}: files cannot be at {scheme[0]}, only in a local folder, or in a bucket: "
            f"gs://… or s3://…{_way_from(scheme[1].lower())}"
        )
    return text


def _of_file_address(text: str, field: str) -> str:
    address = urllib.parse.urlsplit(text)
    if address.netloc not in ("", "localhost"):
        raise ConfigError(
            f"{field}{text}: the file must be on this machine, not on {address.netloc!r}: three slashes, "
            f"file:///{address.netloc}{address.path}"
        )
    return urllib.parse.unquote(address.path)


def _way_from(scheme: str) -> str:
    """Advice for a user who has a file at an address of this scheme."""
    if scheme in ("http", "https", "ftp"):
        return "; download it first, with curl"
    if scheme == "hf":
        return "; download it first, with 'hf download'"
    return ""


def is_address(text: str) -> bool:
    """Whether a text is an address, `SCHEME://…`, of whatever kind."""
    return bool(_ADDRESS.match(text)) or text.startswith("file:/")


def in_bucket(path: epath.PathLike) -> bool:
    """Whether a path is a bucket's: there files appear whole, and nothing can be appended to them."""
    return os.fspath(path).startswith(_BUCKETS)


def is_remote(path: epath.PathLike) -> bool:
    """Whether a path is in a bucket, or on a mount of storage elsewhere, so that each look at another part of a file is
    a request. One that is not there is on no mount.
    """
    if in_bucket(path) or not os.path.exists(path):
        return in_bucket(path)
    about = os.stat(path)
    device = f"{os.major(about.st_dev)}:{os.minor(about.st_dev)}"
    try:
        with open("/proc/self/mountinfo") as file:
            mounts = [line.split(" - ") for line in file]
    except FileNotFoundError:  # systems other than Linux
        return False
    return any(
        _REMOTE.fullmatch(kind.split()[0]) for mount, kind in mounts if mount.split()[2] == device
    )


def nearest_existing(path: epath.PathLike) -> str:
    """'; did you mean …?' with the most similar name of a file or folder in the same folder; '' if no name is similar,
    and for a path that exists.
    """
    if in_bucket(path):
        folder = epath.Path(path).parent
        names = [place.name for place in folder.iterdir()] if folder.is_dir() else []
        name = epath.Path(path).name
    else:
        absolute = os.path.abspath(os.path.expanduser(path))
        folder, name = os.path.split(absolute)
        names = os.listdir(folder) if os.path.isdir(folder) else []
    close = [] if name in names else difflib.get_close_matches(name, names, n=1)
    if not close:
        return ""
    nearest = os.path.join(os.path.dirname(path), close[0])
    return f"; did you mean {nearest!r}?"


def write_whole(path: epath.Path, content: str | bytes) -> None:
    """Writes a file so that readers never see a part of it, whatever happens to the writer."""
    if isinstance(content, str):
        content = content.encode()
    if in_bucket(path):
        with _as_os_errors(path):
            _client(path).pipe_file(os.fspath(path), content)
        return
    new = path.with_name(f"{path.name}.new")
    with open(new, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # else the name may reach the disk before the content
    new.replace(path)


def replace(path: epath.Path, content: str, identity: str) -> str:
    """Writes an object in a bucket if nobody else has written it: if it still has an identity, see `File`.

    Args:
      identity: '' if there must be no such object.

    Returns:
      Its new identity.

    Raises:
      FileExistsError, FileNotFoundError: it has another identity, or is gone. Where the answer to a write was lost
        and its client has asked again, that may be this write's own.
    """
    with _as_os_errors(path):
        return buckets.replace(os.fspath(path), content.encode(), identity)


def remove_unchanged(path: epath.Path, identity: str) -> None:
    """Removes an object in a bucket, if it still has an identity. On S3, which has no such request, it is left
    empty.

    Raises:
      FileExistsError, FileNotFoundError: see `replace`.
    """
    with _as_os_errors(path):
        buckets.remove_unchanged(os.fspath(path), identity)


def upload(file: epath.PathLike, path: epath.PathLike) -> None:
    """Copies a local file; the copy appears when it is complete."""
    if in_bucket(path):
        with _as_os_errors(path):
            _client(path).put_file(os.fspath(file), os.fspath(path))
        return
    new = f"{os.fspath(path)}.new"
    shutil.copyfile(file, new)
    os.replace(new, path)


def json_text(value: Any, indent: int | None = None) -> str:
    """A value as JSON that any reader takes: numbers that are not finite become null."""
    return json.dumps(_without_nonfinite(value), indent=indent, allow_nan=False)


def _without_nonfinite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nonfinite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_json(path: epath.Path, kind: type = dict):
    """The content of a small JSON file beside a run; `None` if it is missing or unusable. The
    latter is logged and never stops a run.

    Args:
      kind: the type that its content must have, `dict` or `list`.
    """
    try:
        value = json.loads(read_bytes(path))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        logging.warning("%s cannot be read (%s): continuing without it", path, error)
        return None
    if not isinstance(value, kind):
        logging.warning("%s holds no %s: continuing without it", path, kind.__name__)
        return None
    return value


# The file that each thread, by name, opened last: a run that hangs may be waiting for one of them.
last_opened: dict[str, str] = {}


def open_bytes(path: epath.PathLike) -> BinaryIO:
    """Opens a file to read; a local one without the cost of a path object, which readers of many
    small files would feel.
    """
    last_opened[threading.current_thread().name] = os.fspath(path)
    return epath.Path(path).open("rb") if in_bucket(path) else open(path, "rb")


def read_bytes(path: epath.PathLike, first: int = 0, size: int | None = None) -> bytes:
    """A whole file, or `size` bytes of it from `first` on; of an object by one request.

    Raises:
      FileNotFoundError: there is no such file.
      OSError: it is shorter.
    """
    last_opened[threading.current_thread().name] = os.fspath(path)
    if in_bucket(path):
        start = first or None  # of whole objects no range is asked, which some servers refuse
        end = None if size is None else first + size
        with _as_os_errors(path):
            content = _client(path).cat_file(os.fspath(path), start=start, end=end)
    else:
        with open(path, "rb") as file:
            file.seek(first)
            content = file.read(-1 if size is None else size)
    if size is not None and len(content) != size:
        raise OSError(f"{path}: expected {size} bytes from {first} on, got {len(content)}")
    return content


def describe_file(path: epath.PathLike) -> File:
    """A file's size and identity.

    Raises:
      FileNotFoundError: there is no such file.
    """
    text = os.fspath(path)
    if in_bucket(text):
        with _as_os_errors(text):
            return _described(_client(text).info(text), text)
    status = os.stat(text)
    return File(text, status.st_size, f"{status.st_size}-{status.st_mtime_ns}")


def files_below(folder: epath.PathLike) -> Iterator[File]:
    """All files of a folder and the folders in it, by name; a bucket's by one listing. Nothing where
    there is no such folder.
    """
    text = os.fspath(folder).rstrip("/")
    if in_bucket(text):
        scheme = buckets.parts(text)[0]
        with _as_os_errors(text):
            entries = _client(text).find(text, detail=True)
        for name, entry in sorted(entries.items()):
            yield _described(entry, f"{scheme}://{name}")
        return
    for where, folders, names in os.walk(text):
        folders.sort()
        for name in sorted(names):
            yield describe_file(os.path.join(where, name))


def names_in(folder: epath.PathLike) -> list[str]:
    """The names of the files and folders in a folder, in no order; [] where there is no such folder."""
    if not in_bucket(folder):
        return os.listdir(folder) if os.path.isdir(folder) else []
    try:
        with _as_os_errors(folder):
            paths = _client(folder).ls(os.fspath(folder), detail=False)
    except FileNotFoundError:
        return []
    return [os.path.basename(name.rstrip("/")) for name in paths]


def matching(pattern: str) -> Iterator[str]:
    """The files and folders that a pattern such as `photos/**/*.jpg` finds, in no order."""
    if not in_bucket(pattern):
        return glob.iglob(pattern, recursive=True)
    scheme = buckets.parts(pattern)[0]
    with _as_os_errors(pattern):
        return (f"{scheme}://{name}" for name in _client(pattern).glob(pattern))


def exists(path: epath.PathLike) -> bool:
    """Whether there is a file or folder."""
    with _as_os_errors(path):
        return epath.Path(path).exists()


def remove(path: epath.PathLike) -> None:
    """Removes a file, or a folder with all that is in it; nothing, if it is not there."""
    place = epath.Path(path)
    with _as_os_errors(path):
        if place.is_dir():
            place.rmtree()
        else:
            place.unlink(missing_ok=True)


@contextlib.contextmanager
def _as_os_errors(path: epath.PathLike) -> Iterator[None]:
    """Raises the errors of the clients of buckets as `OSError`, as for local files."""
    try:
        yield
    except FileNotFoundError:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), os.fspath(path)) from None
    except OSError:
        raise
    except Exception as error:
        if not buckets.is_failure(error):
            raise
        raise OSError(f"{os.fspath(path)}: {buckets.reason(error)}") from error


def _client(path: epath.PathLike):
    return buckets.client(buckets.parts(os.fspath(path))[0])


def _described(entry: dict, path: str) -> File:
    """The size and identity of an object, from the attributes that a client of buckets gives."""
    if entry["type"] == "directory":
        raise FileNotFoundError(path)
    identity = entry.get("generation") or entry.get("ETag") or entry.get("etag") or ""
    return File(path, int(entry["size"]), str(identity).strip('"'))
