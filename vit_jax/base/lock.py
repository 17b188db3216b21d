"""One process at a time in a folder: two runs that write to one workdir would delete each other's
checkpoints and mix their metrics.

On local disks the lock is the operating system's, which a process cannot keep beyond its death. In
a bucket it is a small file that its holder renews. It is free when the holder was a process of this
machine which has ended, or when nobody has renewed it while this process watched: the clocks of two
machines are not compared.
"""

import fcntl
import json
import os
import socket
import threading
import time
import uuid

from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import UserError

_RENEW_SECONDS, _STALE_SECONDS = 10.0, 40.0
_LONG_AGO_SECONDS = 600.0  # more than clocks differ by


class Locked(UserError):
    """Another process holds the lock."""


class Lock:
    """Held in a `with` statement, by one process of a run.

    Raises:
      Locked: another process holds it, and goes on to for `patience` seconds.
    """

    def __init__(
        self,
        folder: epath.Path,
        *,
        name: str = ".lock",
        patience: float = 15.0,
        busy: str = "another run trains in {folder} ({holder}): use another --workdir, or wait until it "
        "has ended",
    ):
        """Makes a lock that is not held yet.

        Args:
          name: of its file in the folder.
          patience: seconds to wait for a run that may be about to end, after a signal.
          busy: the message of `Locked`, with {folder} and {holder}.
        """
        self._path, self._patience, self._busy = folder / name, patience, busy
        self._in_bucket = places.in_bucket(folder)
        self._token = f"{socket.gethostname()}, process {os.getpid()}"
        self._ended = threading.Event()
        # In a bucket: the entry of another holder, and when it was first seen as it is.
        self._watched, self._since, self._renewed = "", 0.0, False

    def __enter__(self) -> "Lock":
        self._unique = uuid.uuid4().hex
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
            places.remove(self._path)
        except OSError as error:
            logging.warning("%s cannot be removed: %s", self._path, error)

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
        try:
            os.ftruncate(self._file, 0)
            os.write(self._file, self._token.encode())
        except OSError:  # a full disk
            os.close(self._file)
            raise
        return True

    def _take_in_bucket(self) -> bool:
        held = self._read()
        if held and not self._is_free(held):
            return False
        self._renew()
        time.sleep(1.0)  # of two that saw it free, the one that wrote last has it
        if (self._read() or {}).get("unique") != self._unique:
            return False
        self._thread = threading.Thread(target=self._keep, name="vit_jax-lock", daemon=True)
        self._thread.start()
        return True

    def _is_free(self, held: dict) -> bool:
        """Whether the holder of an entry is known to be gone."""
        if held.get("machine") and held["machine"] == _machine() and not _is_alive(held["process"]):
            return True
        if time.time() - held["renewed"] > _LONG_AGO_SECONDS:
            return True
        if (entry := json.dumps(held)) != self._watched:
            self._renewed = bool(self._watched)
            self._watched, self._since = entry, time.monotonic()
            if not self._renewed:
                logging.info(
                    "%s is held by %s: waiting %g s to see if that run is alive",
                    self._path, held["holder"], _STALE_SECONDS,
                )  # fmt: skip
        return time.monotonic() - self._since > _STALE_SECONDS

    def _keep(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                self._renew()
            except OSError as error:
                logging.warning("%s cannot be renewed: %s", self._path, error)

    def _read(self) -> dict | None:
        try:
            return json.loads(places.read_bytes(self._path))
        except FileNotFoundError:
            return None

    def _renew(self) -> None:
        entry = {
            "holder": self._token,
            "unique": self._unique,
            "renewed": time.time(),
            "machine": _machine(),
            "process": os.getpid(),
        }
        places.write_whole(self._path, json.dumps(entry))

    def _holder(self) -> str:
        if self._in_bucket:
            return json.loads(self._watched)["holder"] if self._watched else "it has just begun"
        return self._path.read_text() or "it has just begun"


def _machine() -> str:
    """What the processes have in common that see each other's numbers."""
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
