"""Checkpoints on each host's own disk or RAM disk, saved often beside the rare ones in the workdir.

DIR/vit_jax-RUN/SESSION.PROCESS.STEP holds the shards on the devices of one process after one step.
A step can be restored when the processes together have all shards of it: a process whose files are
gone gets the shards that others hold too. Files are data without code; how they look is in
`shards`, the checkpoints in the workdir are in `saving`.

    Two shards in two copies. A kill cut off the save of step 60, and host 2 was replaced:

        process   shard on its devices   file of step 40   of step 60   restores step 60
        0         0                      whole             whole        from its file; sends shard 0
        1         1                      whole             whole        from its file; sends shard 1
        2         0                      none              none         gets shard 0
        3         1                      whole             unfinished   gets shard 1

    With host 1 replaced too, nobody has shard 1 of step 60, and step 40 is restored: shard 1 by process 3.
"""

import contextlib
import hashlib
import json
import pathlib
import re
import shutil
import socket
import threading
import time
import uuid
from collections.abc import Callable

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import descriptions, fingerprints, shards
from vit_jax.checkpoints.reading import everywhere
from vit_jax.checkpoints.shards import Layout, ShardFile
from vit_jax.devices import processes

RUN = "run.json"
FILES = 2  # of each process: the newest that all have written, and the one being written
_SLACK = 1.1  # of a disk, for what file systems need beside the files
_LONG_WAIT = 5.0  # seconds
_NAME = re.compile(r"([0-9a-f]{8})\.(\d+)\.(\d+)(\.new)?")


class LocalTier:
    """Saves a run's states on local disks and restores the newest that the processes have together.

    All processes of a run call the same methods in the same order. Nothing here ends a run: what
    cannot be written or read is logged, and what is good is used.
    """

    def __init__(
        self,
        directory: str,
        workdir: epath.Path,
        like: dict,
        wait_minutes: float = processes.WAIT_MINUTES,
    ):
        """Looks at the disk, and warns if it is too small.

        Args:
          directory: on a local disk or RAM disk of each host; several processes may share it.
          workdir: of the run.
          like: shapes, dtypes and shardings of the parts of the state, by name.
          wait_minutes: how long processes wait for each other's writes.
        """
        self._workdir, self._wait = workdir, wait_minutes
        self._layout = Layout(like)
        name = hashlib.sha256(str(workdir).encode()).hexdigest()[:12]
        self._folder = pathlib.Path(directory).expanduser().absolute() / f"vit_jax-{name}"
        session = json.dumps([_run_id(workdir), uuid.uuid4().hex[:8]]) if _first() else ""
        self._run, self._session = json.loads(
            processes.broadcast_from_first("local tier", session, wait_minutes)
        )
        self._thread: threading.Thread | None = None
        self._complete: int | None = None  # the newest step that all processes have written
        self._failing = False
        self._check_disk()

    def save(self, step: int, parts: dict, description: dict, marks: dict | None = None) -> None:
        """Copies the state to the host's memory; a thread writes it, and deletes older files.

        Args:
          step: steps trained.
          parts: the state's, by name; trees of arrays.
          description: see `descriptions.describe`.
          marks: the `fingerprint` of the parts, where it is known already.
        """
        self._settle()
        if marks:
            description = description | {fingerprints.FIELD: fingerprints.described(marks)}
        header = {
            "run": self._run,
            "step": step,
            "layout": self._layout.signature,
            "description": description,
        }
        copied = self._layout.copy_own(parts)
        self._thread = threading.Thread(
            target=self._write, args=(step, header, copied), name="vit_jax-tier", daemon=True
        )
        self._thread.start()

    def restore(
        self, newer_than: int, before_restore: Callable[[dict], None] = lambda description: None
    ) -> tuple[int, dict] | None:
        """The newest state that the processes can put together.

        Args:
          newer_than: only steps above this one count.
          before_restore: called with the description of the state; a `ConfigError` that it raises
            is logged, and nothing is restored.

        Returns:
          (step, parts), or `None` where there is none.
        """
        self._settle()
        files = self._files()
        while True:
            held = {step: self._held(of_step) for step, of_step in files.items()}
            offers = _gather_offers(held, self._wait)
            complete = [s for s, by in offers.items() if s > newer_than and self._all_of(by)]
            if not complete:
                return None
            step = max(complete)
            description = self._described(files.get(step, []), offers[step])
            try:
                before_restore(description)
            except ConfigError as error:
                logging.warning("local checkpoints are not used: %s", error)
                return None
            try:
                by_number = everywhere(
                    lambda step=step: self._read(files[step]) if step in files else {}
                )
            except CheckpointError as error:
                logging.warning("config.checkpoint.local: %s; trying what else there is", error)
                continue
            parts = self._state(by_number, offers[step])
            if changed := self._changed(parts, description):
                logging.warning(
                    "config.checkpoint.local: the bits of %s in step %d are not those that were saved; trying what "
                    "else there is", changed, step,
                )  # fmt: skip
                files.pop(step, None)
                continue
            logging.info("step %d was restored from local disks (config.checkpoint.local)", step)
            self._complete = step
            return step, parts

    def discard(self) -> None:
        """Deletes this process's files: the workdir has what they were for."""
        self._settle()
        self._complete = None
        self._delete(lambda session, step: True)
        with contextlib.suppress(OSError):  # Another process has files there.
            self._folder.rmdir()

    def close(self) -> None:
        """Waits for the write under way, unless other processes may have ended."""
        if self._thread:
            self._thread.join(None if processes.count() == 1 else _LONG_WAIT)

    def _settle(self) -> None:
        """Waits for the write under way."""
        if self._thread is None:
            return
        began = time.monotonic()
        self._thread.join()
        waited, self._thread = time.monotonic() - began, None
        if waited > _LONG_WAIT:
            logging.warning(
                "training waited %.0f s for the state to be written to %s: set "
                "config.checkpoint.local_every to more steps, or use a faster disk",
                waited, self._folder,
            )  # fmt: skip

    def _write(self, step: int, header: dict, copied: dict) -> None:
        """Writes one file, so that at most `FILES` of this process are there at any time."""
        failure = ""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._delete(lambda session, old: old != self._complete)
            shards.write_shards(self._file(step), header, copied)
        except OSError as error:
            failure = f"{self._folder}: {error.strerror or error}"
        try:
            failures = processes.failures("local tier", failure, self._wait)
        except processes.HostsError:  # The run is ending.
            return
        if not failures:
            self._complete = step
            self._delete(lambda session, old: session != self._session)
        self._report(step, failures)

    def _report(self, step: int, failures: dict[int, str]) -> None:
        """Logs when writes begin to fail, and when they work again."""
        if bool(failures) == self._failing or not _first():
            return
        self._failing = bool(failures)
        if failures:
            first = min(failures)
            logging.warning(
                "the local checkpoint of step %d cannot be written by %d of %d processes (process %d: "
                "%s). Training continues; the last good ones are kept. Free the disk, or set "
                "config.checkpoint.local to another",
                step, len(failures), processes.count(), first, failures[first],
            )  # fmt: skip
        else:
            logging.info("local checkpoints are written again, from step %d on", step)

    def _file(self, step: int) -> pathlib.Path:
        return self._folder / f"{self._session}.{processes.index()}.{step}"

    def _delete(self, superfluous: Callable[[str, int], bool]) -> None:
        """Deletes files of this process and of earlier sessions: the unfinished ones, and those for
        which `superfluous(session, step)`.
        """
        for path, (session, process, step, finished) in _listed(self._folder).items():
            mine = process == processes.index() or session != self._session
            if mine and (not finished or superfluous(session, step)):
                with contextlib.suppress(FileNotFoundError):  # Another process was faster.
                    path.unlink()

    def _files(self) -> dict[int, list[ShardFile]]:
        """The good files of this run on this host, by step."""
        by_step, refused = {}, []
        for path, (_, _, step, finished) in _listed(self._folder).items():
            if not finished:
                continue
            try:
                file = shards.open_shards(path)
            except CheckpointError as error:
                refused.append(str(error))
                continue
            if file.header["run"] != self._run:
                refused.append(f"{path} is of an earlier run in {self._workdir}")
            elif file.header["layout"] != self._layout.signature:
                refused.append(f"{path} is of another model, optimizer or config.mesh")
            else:
                by_step.setdefault(step, []).append(file)
        if refused:
            others = f", and {len(refused) - 1} more" if len(refused) > 1 else ""
            logging.warning("config.checkpoint.local: %s%s: not used", refused[0], others)
        return by_step

    def _held(self, files: list[ShardFile]) -> set[int]:
        """The shards that this process has both on a disk and on its devices."""
        return {number for file in files for number in file.shards} & self._layout.own.keys()

    def _all_of(self, offers: list[set[int]]) -> bool:
        return len(set().union(*offers)) == self._layout.count

    def _described(self, files: list[ShardFile], offers: list[set[int]]) -> dict:
        """The description of a state; the same in all processes."""
        first = next(process for process, offer in enumerate(offers) if offer)
        mine = json.dumps(files[0].header["description"]) if first == processes.index() else ""
        described = processes.gather("description of a local checkpoint", mine, self._wait)
        return descriptions.with_current_names(json.loads(described[first]))

    def _read(self, files: list[ShardFile]) -> dict[int, np.ndarray]:
        """This process's shards from files of one step; a damaged file is removed from the list.

        Raises:
          CheckpointError: a file is damaged.
        """
        by_number = {}
        for file in list(files):
            try:
                for number in file.shards.keys() & self._layout.own.keys() - by_number.keys():
                    by_number[number] = shards.read_shard(file, number, self._layout)
            except CheckpointError:
                files.remove(file)
                raise
        return by_number

    def _state(self, by_number: dict[int, np.ndarray], offers: list[set[int]]) -> dict:
        """The parts of a state, from this process's shards and those of the others."""
        whole = len(by_number) == len(self._layout.own)
        missing = processes.failures("missing shards", "" if whole else "missing", self._wait)
        if not missing:
            return self._layout.arrays(by_number)
        logging.info(
            "the missing shards of process %s come from the others", ", ".join(map(str, missing))
        )
        earlier = set().union(*offers[: processes.index()])
        return self._layout.gathered(by_number, sent=by_number.keys() - earlier)

    def _changed(self, parts: dict, description: dict) -> str:
        """The name of an array that is not the one that was saved, on a device of any process; '' for none."""
        described = description.get(fingerprints.FIELD)  # which earlier versions did not save
        mine = fingerprints.find_changed(parts, described) if described else None
        changed = processes.failures("marks of a local checkpoint", mine or "", self._wait)
        return next(iter(changed.values()), "")

    def _check_disk(self) -> None:
        """Logs what the files need, and warns if the disk has less."""
        size, host = self._layout.own_bytes, socket.gethostname()
        hosts = processes.gather("hosts of local tiers", host, self._wait)
        if hosts.index(host) != processes.index():
            return
        count = hosts.count(host)
        logging.info(
            "local checkpoints: %d x %s for each process in %s", FILES, _text(size), self._folder
        )
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            used = sum(path.stat().st_size for path in _listed(self._folder))
            free = shutil.disk_usage(self._folder).free + used
        except OSError as error:
            logging.warning(
                "config.checkpoint.local = %s cannot be used on %s: %s. Training continues without it",
                self._folder.parent, host, error.strerror,
            )  # fmt: skip
            return
        if free < (need := disk_bytes(size * count)):
            logging.warning(
                "config.checkpoint.local: %s has %s free on %s, and %s are needed (%d files for each "
                "of %d processes, and 10 %%): enlarge it, or free it of other runs",
                self._folder.parent, _text(free), host, _text(need), FILES, count,
            )  # fmt: skip


def disk_bytes(size: int) -> int:
    """Bytes of a disk that local checkpoints need, for processes with `size` bytes of state."""
    return round(FILES * size * _SLACK)


def _first() -> bool:
    return processes.index() == 0


def _text(size: float) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def _run_id(workdir: epath.Path) -> str:
    """A text that no other run has, not even an earlier one in the same workdir."""
    saved = places.read_json(workdir / RUN) or {}
    if "id" not in saved:
        saved = {"id": uuid.uuid4().hex}
        try:
            places.write_whole(workdir / RUN, json.dumps(saved) + "\n")
        except OSError as error:
            logging.warning(
                "%s cannot be written (%s): local checkpoints will not be found after a restart",
                workdir / RUN, error,
            )  # fmt: skip
    return saved["id"]


def _listed(folder: pathlib.Path) -> dict[pathlib.Path, tuple[str, int, int, bool]]:
    """The files in a run's folder: session, process, step, and whether it is finished."""
    names = {path: _NAME.fullmatch(path.name) for path in folder.glob("*")}
    return {
        path: (name[1], int(name[2]), int(name[3]), not name[4])
        for path, name in names.items()
        if name
    }


def _gather_offers(held: dict[int, set[int]], wait: float) -> dict[int, list[set[int]]]:
    """By step, what each process has of it."""
    mine = {step: f"{sum(1 << n for n in numbers):x}" for step, numbers in held.items()}
    offers = [json.loads(x) for x in processes.gather("local offers", json.dumps(mine), wait)]
    steps = {int(step) for offer in offers for step in offer}
    return {step: [_numbers(offer.get(str(step), "0")) for offer in offers] for step in steps}


def _numbers(mask: str) -> set[int]:
    bits = f"{int(mask, 16):b}"[::-1]
    return {number for number, bit in enumerate(bits) if bit == "1"}
