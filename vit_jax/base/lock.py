"""One process at a time in a folder: two runs that write to one workdir would delete each other's
checkpoints and mix their metrics.

On local disks the lock is the operating system's, which a process cannot keep beyond its death. In
a bucket it is a small file that its holder renews. It is free when the holder was a process of this
machine which has ended, or when nobody has renewed it for a while by the bucket's clock: the clocks of
two machines are not compared. Whoever takes, renews or releases it names the generation that it has
seen, and the bucket refuses all but the first: however late answers are, one alone has it.
"""

import errno
import fcntl
import json
import os
import pwd
import socket
import threading
import time
import uuid
from collections.abc import Callable

from absl import logging
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError, UserError

NAME = ".lock"
_RENEW_SECONDS = 10.0
_STALE_SECONDS = 40.0
_NOBODY = "nobody"


class Locked(UserError):
    """Another process holds the lock."""


class Unusable(UserError, OSError):
    """The lock's file cannot be opened, and a later start would not change that."""

    exit_code = ConfigError.exit_code


class Lock:
    """Held in a `with` statement, by one process of a run.

    Raises:
      Locked: another process holds it, and still does after `patience` seconds.
    """

    def __init__(
        self,
        folder: epath.Path,
        *,
        name: str = NAME,
        patience: float = 15.0,
        busy: str = "another run trains in {folder} ({holder}): use another --workdir, or wait until it "
        "has ended",
        on_lost: Callable[[str], None] = logging.error,
    ):
        """Makes a lock that is not held yet.

        Args:
          name: of its file in the folder.
          patience: seconds to wait for a run that may be about to end, after a signal.
          busy: the message of `Locked`, with {folder} and {holder}.
          on_lost: called with a sentence, in a thread, when the lock could not be renewed in time and another
            process took it over.
        """
        self._path = folder / name
        self._patience = patience
        self._busy = busy
        self._on_lost = on_lost
        self._in_bucket = places.in_bucket(folder)
        self._token = f"{socket.gethostname()}, process {os.getpid()}"
        self._unique = uuid.uuid4().hex
        self._ended = threading.Event()
        # In a bucket:
        self._watched: dict | None = None  # the entry of another holder
        self._renewed = False  # whether that entry was renewed since it was seen
        self._generation = ""  # the generation that was seen last
        self._lost = False  # whether another process took the lock over

    def __enter__(self) -> "Lock":
        deadline = time.monotonic() + self._patience
        take = self._take_in_bucket if self._in_bucket else self._take
        while not take():
            waits = self._in_bucket and not self._renewed  # until it is known to be in use
            if time.monotonic() > deadline and not waits:
                message = self._busy.replace("{holder}", self._holder())
                raise Locked(message.replace("{folder}", str(self._path.parent)))
            time.sleep(0.5)
        return self

    def __exit__(self, *_) -> None:
        if not self._in_bucket:
            os.close(self._file)
            return
        self._ended.set()
        self._thread.join()
        try:
            if not self._lost:
                places.remove_unchanged(self._path, self._generation)
        except (FileExistsError, FileNotFoundError):  # It is another's by now.
            pass
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            logging.warning("%s cannot be removed: %s", self._path, buckets.reason(error))

    def _take(self) -> bool:
        try:
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise _not_opened(self._path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            return False
        except OSError as error:  # a file system without locks
            logging.warning("%s: %s: nothing keeps a second run out", self._path, error)
            return True
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, self._token.encode())
        except OSError:  # a full disk
            os.close(self._file)
            raise
        return True

    def _take_in_bucket(self) -> bool:
        held, self._generation = _look(self._path)
        if held and not _is_free(self._path, held):
            self._watch(held)
            return False
        if self._write():
            return False
        self._thread = threading.Thread(target=self._keep, name="vit_jax-lock", daemon=True)
        self._thread.start()
        return True

    def _watch(self, held: dict) -> None:
        """Notices whether the holder shows that it is alive."""
        if self._watched is None:
            logging.info(
                "%s is held by %s: waiting up to %g s to see if that run is alive",
                self._path, held["holder"], _STALE_SECONDS,
            )  # fmt: skip
        elif self._watched != held:
            self._renewed = True
        self._watched = held

    def _keep(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                holder = self._write()
            except Exception as error:
                if not buckets.is_failure(error):
                    raise
                logging.warning("%s cannot be renewed: %s", self._path, buckets.reason(error))
                continue
            if holder not in ("", _NOBODY):
                self._lost = True
                self._on_lost(
                    f"{self._path} could not be renewed for {_STALE_SECONDS:g} s, and {holder} took "
                    "it over: this run ends, and the other continues"
                )
                return

    def _write(self) -> str:
        """Replaces the generation that was seen last by the entry of this process. Returns the holder of the
        lock; '' if that is this process.
        """
        entry = {
            "holder": self._token,
            "unique": self._unique,
            "renewed": time.time(),
            "machine": _machine(),
            "process": os.getpid(),
        }
        content = json.dumps(entry)
        try:
            self._generation = places.replace(self._path, content, self._generation)
            return ""
        except (FileExistsError, FileNotFoundError):  # It is of another generation by now, or gone.
            held, self._generation = _look(self._path)
        if held and held["unique"] == self._unique:  # The answer to a write was lost.
            return ""
        return held["holder"] if held else _NOBODY

    def _holder(self) -> str:
        if self._in_bucket:
            return self._watched["holder"] if self._watched else "it has just begun"
        return self._path.read_text() or "it has just begun"


def is_held(folder: epath.Path, name: str = NAME) -> bool:
    """Whether a run trains in a workdir, as far as its lock shows; or another lock in a folder is held."""
    path = folder / name
    if places.in_bucket(folder):
        held, _ = _look(path)
        return held is not None and not _is_free(path, held)
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    except PermissionError as error:
        logging.log_first_n(
            logging.WARNING, "%s: it counts as held, as nothing shows that it is free", 1, _not_opened(path, error)
        )  # fmt: skip
        return True
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def _not_opened(path: epath.Path, error: OSError) -> Exception:
    """The sentence for a lock's file that cannot be opened; `error` itself, if it may pass or is another."""
    if error.errno == errno.EISDIR:
        return Unusable(
            f"{path} is a folder, and a lock is a file: remove it, or use another folder"
        )
    if error.errno == errno.EROFS:
        return Unusable(
            f"{path} cannot be written, its file system is read-only: mount it to be written, or use another folder"
        )
    if error.errno not in (errno.EACCES, errno.EPERM):
        return error
    return Unusable(
        f"{path} cannot be opened by user {_user(os.geteuid())}: {_owner(path)}. Use another folder, or start as "
        "that user; if no process of theirs uses this folder, let them remove the file"
    )


def _owner(path: epath.Path) -> str:
    """The owner of the file, or of its folder if there is no such file."""
    for place, kind in ((path, "the file"), (path.parent, "its folder")):
        try:
            return f"{kind} is of user {_user(os.stat(place).st_uid)}"
        except OSError:  # It is not there, or the folder must not be looked into.
            continue
    return "its folder is another user's"


def _user(number: int) -> str:
    """A user's name, or the number of one that has none on this machine."""
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return str(number)


def _look(path: epath.Path) -> tuple[dict | None, str]:
    """The entry of a lock in a bucket, or `None` if nobody holds it, as after a copy from a local workdir, and the
    generation of its file or an earlier one; '' if there is none.
    """
    generation = ""
    try:
        generation = places.describe_file(path).identity
        return json.loads(places.read_bytes(path)), generation
    except FileNotFoundError:
        return None, ""
    except ValueError:
        return None, generation


def _is_free(path: epath.Path, held: dict) -> bool:
    """Whether the holder of a lock in a bucket is known to be gone."""
    if held.get("machine") and held["machine"] == _machine() and not _is_alive(held["process"]):
        return True
    try:
        return _bucket_time(path) - _modified(path) > _STALE_SECONDS
    except FileNotFoundError:  # Released in this moment: the next look finds it free.
        return False


def _bucket_time(path: epath.Path) -> float:
    """The time by the bucket's own clock: when a file was written just now."""
    probe = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    places.write_whole(probe, b"")
    try:
        return _modified(probe)
    finally:
        probe.unlink()


def _modified(path: epath.Path) -> float:
    """When an object was written last, in seconds of the bucket's clock."""
    scheme, _, _ = buckets.parts(os.fspath(path))
    return buckets.client(scheme).modified(os.fspath(path)).timestamp()


def _machine() -> str:
    """An identifier of the process namespace: processes with the same one see each other's numbers."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return (
                f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
            )
    except OSError:  # not on Linux
        return ""


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # another user's
        pass
    return True
