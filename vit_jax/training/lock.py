"""One run at a time in a workdir: two that write to one would delete each other's checkpoints and mix
their metrics.

On local disks the lock is the operating system's, which a process cannot keep beyond its death. In
a bucket it is a small file that its holder renews. One that has not been renewed for a while is free,
by the bucket's clock: hosts' clocks may differ by more than that.
"""

import fcntl
import json
import os
import pathlib
import socket
import threading
import time
import uuid

from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import UserError
from vit_jax.devices import processes

NAME = ".lock"
_RENEW_SECONDS, _STALE_SECONDS = 20.0, 90.0


class Locked(UserError):
    """Another process works in the folder."""


class Lock:
    """Held in a `with` statement, by one process of a run.

    Raises:
      Locked: another process holds it, and goes on to for `patience` seconds.
    """

    def __init__(
        self,
        folder: epath.Path,
        name: str = NAME,
        *,
        patience: float = 15.0,
        message: str = "another run trains in {folder} ({holder}): use another --workdir, or wait "
        "until it has ended",
    ):
        """Makes a lock that is not held yet.

        Args:
          folder: where its file is.
          name: of the file.
          patience: seconds to wait for a run that may be about to end, after a signal.
          message: of `Locked`, with the folder and the holder to be filled in.
        """
        self._path, self._patience, self._message = folder / name, patience, message
        self._in_bucket = places.in_bucket(folder)
        self._token = f"{socket.gethostname()}, process {os.getpid()}"
        self._unique = uuid.uuid4().hex
        self._ended = threading.Event()
        self._seen: tuple | None = None  # what the holder's file held at first
        self._waits_for_dead = False

    def __enter__(self) -> "Lock":
        deadline = time.monotonic() + self._patience
        take = self._take_in_bucket if self._in_bucket else self._take
        while not take():
            if time.monotonic() > deadline and not self._waits_for_dead:
                raise Locked(self._message.format(folder=self._path.parent, holder=self._holder()))
            time.sleep(2.0 if self._in_bucket else 0.5)
        return self

    def __exit__(self, *_) -> None:
        if self._in_bucket:
            self._ended.set()
            self._thread.join()
            self._path.unlink(missing_ok=True)
        else:
            os.close(self._file)

    def _take(self) -> bool:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._file)
            return False
        except OSError as error:  # a file system without locks
            logging.warning("%s: %s: nothing keeps a second run out", self._path, error)
            return True
        os.ftruncate(self._file, 0)
        os.write(self._file, self._token.encode())
        return True

    def _take_in_bucket(self) -> bool:
        held = places.read_json(self._path) or {}
        if held and not _is_free(self._path, held):
            self._wait_for(held)
            return False
        self._renew()
        time.sleep(1.0)  # of two that saw it free, the one that wrote last has it
        if (places.read_json(self._path) or {}).get("unique") != self._unique:
            return False
        self._thread = threading.Thread(target=self._keep, name="vit_jax-lock", daemon=True)
        self._thread.start()
        return True

    def _wait_for(self, held: dict) -> None:
        """Notices whether the holder shows that it is alive."""
        now = held.get("unique"), held.get("renewed")
        if self._seen is None:
            self._seen, self._waits_for_dead = now, True
            logging.info(
                "%s is held by %s: waiting until it is released, or was not renewed for %g s",
                self._path, held.get("holder"), _STALE_SECONDS,
            )  # fmt: skip
        elif self._seen != now:
            self._waits_for_dead = False

    def _keep(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                held = places.read_json(self._path) or {}
                if held.get("unique", self._unique) != self._unique:
                    processes.leave(
                        f"{self._path} was not renewed in time, and {held.get('holder')} took it over: two "
                        "runs must not write to one folder, so this one ends",
                        UserError.exit_code,
                    )
                self._renew()
            except OSError as error:
                logging.warning("%s cannot be renewed: %s", self._path, error)

    def _renew(self) -> None:
        entry = {"holder": self._token, "unique": self._unique, "renewed": time.time()}
        entry |= {"machine": _machine(), "process": os.getpid()}
        self._path.write_text(json.dumps(entry))

    def _holder(self) -> str:
        text = self._path.read_text()
        return json.loads(text)["holder"] if self._in_bucket else text or "it has just begun"


def is_held(folder: epath.Path) -> bool:
    """Whether a run trains in a workdir, as far as its lock shows."""
    path = folder / NAME
    if places.in_bucket(folder):
        held = places.read_json(path)
        return bool(held) and not _is_free(path, held)
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without locks
        return False
    finally:
        os.close(file)
    return False


def _is_free(path: epath.Path, held: dict) -> bool:
    """Whether the holder of a lock in a bucket is dead: a process of this machine that has ended, or one
    that has not renewed the lock for long.
    """
    machine = _machine()
    same_machine = machine and held.get("machine") == machine
    if same_machine and not os.path.exists(f"/proc/{held['process']}"):
        return True
    try:
        return _bucket_time(path) - _modified(path) > _STALE_SECONDS
    except FileNotFoundError:  # Released in this moment: the next look finds it free.
        return False


def _bucket_time(path: epath.Path) -> float:
    """The time by the bucket's own clock: when a file was written just now."""
    probe = path.with_name(f"{path.name}-{uuid.uuid4().hex}")
    probe.write_bytes(b"")
    try:
        return _modified(probe)
    finally:
        probe.unlink()


def _modified(path: epath.Path) -> float:
    """When a file was written last, by the clock of where it is."""
    import fsspec

    file_system, name = fsspec.core.url_to_fs(os.fspath(path))
    return file_system.modified(name).timestamp()


def _machine() -> str:
    """What is the same for all processes that see each other's numbers, and no others; '' if unknown."""
    try:
        boot = pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""
