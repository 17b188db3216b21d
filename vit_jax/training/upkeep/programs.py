"""Compiled programs beside a run: a restart compiles nothing, also on machines that have not run it before.

JAX finds a program in a folder by everything that it depends on: its text, versions, devices and
flags. Of several processes only the first writes there, and pods lose their folders. So the programs
of such a run are copied to WORKDIR/compiled, with checksums, and from there to each process that
starts. (On CPUs JAX tells processes apart, and only the first finds its programs.) A program is code:
whoever can write to the workdir of a run can run code in it.
"""

import concurrent.futures
import hashlib
import json
import os
import pathlib
import shutil
import stat
import threading

import jax
import jaxlib
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.devices import processes
from vit_jax.training import guards

FOLDER = "compiled"
AUTO = "auto"
HOME = "~/.cache/vit_jax/xla"
_INDEX = "index.json"
_REQUESTS = 8  # at the same time
_STORED = "*-cache"  # as JAX names its entries


class Programs:
    """The compiled programs of a run. With config.compilation_cache = 'auto', the programs of several processes and of
    runs in a bucket are copied between WORKDIR/compiled and JAX's folder. If a copy fails, that is logged, and the run
    compiles.
    """

    def __init__(self, directory: str, workdir: epath.Path):
        """Has JAX keep programs; to be called before anything is compiled.

        Args:
          directory: config.compilation_cache.
        """
        self._workdir = workdir
        self._local: pathlib.Path | None = None  # where JAX keeps programs that are copied
        self._stored: dict[str, str] = {}  # checksums, by name
        self._thread: threading.Thread | None = None
        # XLA does not order collectives inside the loops of a program that it reads again, so that simulated devices
        # could wait for each other forever.
        if directory == AUTO and jax.default_backend() == "cpu" and jax.local_device_count() > 1:
            logging.info("compiled programs are not kept: simulated devices need new ones")
            return
        if directory == AUTO and not places.has_home():
            logging.info(
                "compiled programs are not kept: the home folder is not known (HOME is not set)"
            )
            return
        shared = processes.count() > 1 or places.in_bucket(workdir)
        if directory != AUTO or not shared:
            guards.use_compilation_cache(HOME if directory == AUTO else directory)
            return
        name = hashlib.sha256(str(workdir).encode()).hexdigest()[:12]
        home = pathlib.Path(HOME).expanduser()
        local = home.parent / "runs" / f"{name}-{processes.index()}"
        try:
            shutil.rmtree(local, ignore_errors=True)  # A process may have ended in a write.
            local.mkdir(mode=0o700, parents=True)
        except OSError as error:
            logging.warning(
                "%s cannot be made (%s): compiled programs are not kept", local, error.strerror
            )
            return
        self._local = local
        jax.config.update("jax_compilation_cache_dir", str(local))
        # JAX would make the name of this folder a part of the keys of programs.
        jax.config.update("jax_persistent_cache_enable_xla_caches", "none")

    def fetch(self) -> None:
        """Copies the programs for these devices and versions from the workdir."""
        self._store = self._workdir / FOLDER / fingerprint()
        if not self._local or not _is_ours(self._workdir / FOLDER):
            return
        stored = places.read_json(self._store / _INDEX) or {}
        self._stored = {name: mark for name, mark in stored.items() if "/" not in name}
        names = list(self._stored)
        with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
            are_good = list(pool.map(self._fetch, names))
        for name, is_good in zip(names, are_good, strict=True):
            if not is_good:
                del self._stored[name]
        if self._stored:
            logging.info("%d compiled programs from %s", len(self._stored), self._store)

    def keep(self) -> None:
        """Starts to copy new programs to the workdir, by the first process."""
        if processes.index() or not self._local or not self._new():
            return
        self.close()
        self._thread = threading.Thread(target=self._keep, name="vit_jax-programs", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Waits for the copy under way."""
        if self._thread:
            self._thread.join()

    def _new(self) -> list[pathlib.Path]:
        return [path for path in self._local.glob(_STORED) if path.name not in self._stored]

    def _fetch(self, name: str) -> bool:
        """Copies one program; whether it is the one that was stored."""
        try:
            content = places.read_bytes(self._store / name)
            if _mark(content) == self._stored[name]:
                (self._local / name).write_bytes(content)
                return True
            why = "is damaged"
        except OSError as error:
            why = f"cannot be read ({error.strerror or error})"
        logging.warning("%s %s: the program is compiled again", self._store / name, why)
        return False

    def _keep(self) -> None:
        try:
            if not places.in_bucket(self._store):
                self._store.parent.mkdir(mode=0o700, exist_ok=True)
                self._store.mkdir(mode=0o700, exist_ok=True)
            for path in self._new():
                content = path.read_bytes()
                places.write_whole(self._store / path.name, content)
                self._stored[path.name] = _mark(content)
            index = json.dumps(self._stored)
            places.write_whole(self._store / _INDEX, index + "\n")
        except OSError as error:
            logging.warning(
                "compiled programs cannot be written to %s (%s): a restart compiles them again",
                self._store, error.strerror or error,
            )  # fmt: skip


def fingerprint() -> str:
    """A text that differs where programs compiled elsewhere are of no use."""
    device = jax.devices()[0]
    parts = [
        jax.__version__,
        jaxlib.__version__,
        device.client.platform_version,
        device.device_kind,
        jax.device_count(),
        jax.process_count(),
        os.environ.get("XLA_FLAGS", ""),
        os.environ.get("LIBTPU_INIT_ARGS", ""),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _mark(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _is_ours(folder: epath.Path) -> bool:
    """Whether only the user can write to a local folder; programs of other users are not run."""
    if places.in_bucket(folder) or not folder.exists():
        return True
    status = os.stat(folder)
    others_can_write = bool(status.st_mode & (stat.S_IWGRP | stat.S_IWOTH))
    of_others = status.st_uid not in (os.getuid(), 0)
    if others_can_write or of_others:
        logging.warning(
            "%s belongs to others or can be written by them, who could run code in this job: its "
            "compiled programs are not used. Delete it, or chmod 700 it",
            folder,
        )
        return False
    return True
