"""One run at a time in a workdir: two that write to one would delete each other's checkpoints and mix
their metrics.

On local disks the lock is the operating system's, which a process cannot keep beyond its death. In
a bucket it is a small file that its holder renews; one that has not been renewed for a while counts
as free.
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

_NAME = ".lock"
_RENEW_SECONDS, _STALE_SECONDS = 20.0, 90.0


class Locked(UserError):
    """Another process trains in the workdir."""


class Lock:
    """Held in a `with` statement, by one process of a run.

    Raises:
      Locked: another process holds it, and goes on to for `patience` seconds.
    """

    def __init__(self, workdir: epath.Path, *, patience: float = 15.0):
        """Makes a lock that is not held yet.

        Args:
          patience: seconds to wait for a run that may be about to end, after a signal.
        """
        self._path, self._patience = workdir / _NAME, patience
        self._in_bucket = places.in_bucket(workdir)
        self._token = f"{socket.gethostname()}, process {os.getpid()}"
        self._ended = threading.Event()

    def __enter__(self) -> "Lock":
        self._unique = uuid.uuid4().hex
        deadline = time.monotonic() + self._patience
        take = self._take_in_bucket if self._in_bucket else self._take
        while not take():
            if time.monotonic() > deadline:
                raise Locked(
                    f"another run trains in {self._path.parent} ({self._holder()}): use another --workdir, "
                    "or wait until it has ended"
                )
            time.sleep(0.5)
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
        if time.time() - held.get("renewed", 0) < _STALE_SECONDS:
            return False
        self._renew()
        time.sleep(1.0)  # of two that saw it free, the one that wrote last has it
        if (places.read_json(self._path) or {}).get("unique") != self._unique:
            return False
        self._thread = threading.Thread(target=self._keep, name="vit_jax-lock", daemon=True)
        self._thread.start()
        return True

    def _keep(self) -> None:
        while not self._ended.wait(_RENEW_SECONDS):
            try:
                self._renew()
            except OSError as error:
                logging.warning("%s cannot be renewed: %s", self._path, error)

    def _renew(self) -> None:
        entry = {"holder": self._token, "unique": self._unique, "renewed": time.time()}
        self._path.write_text(json.dumps(entry))

    def _holder(self) -> str:
        text = self._path.read_text()
        return json.loads(text)["holder"] if self._in_bucket else text or "it has just begun"
