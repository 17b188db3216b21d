"""One checkpoint, written by all processes of a run and committed by the first: a commit in two phases.

1. Process 0 makes the folder, under a name that says that it is unfinished.
2. Every process copies its shards from its devices, for which training waits, and writes them, for which it does
   not.
3. Every process reports how that went, at once if it has failed. Nobody waits longer than for the slowest writer.
4. If all have written, process 0 merges their indexes and gives the folder its final name (in a bucket: its mark).
   It reports how that went, at once too, and has a limit of its own.

Reports go through the coordination service. Orbax's handlers write the files. Its `AsyncCheckpointer` does not: there
the other processes wait for a commit until their time is up, also when it has failed.
"""

import asyncio
import concurrent.futures
import errno
import json
import os
import threading
import time
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.checkpoints import storage
from vit_jax.checkpoints.reading import COMMITTED
from vit_jax.devices import processes

_SLACK_MINUTES = 1.0  # between the end of what a process may take and that of the others' patience
# Replicas of an array each write a slice of it, if it has this many bytes: making one takes a program, which each
# process compiles before its first save.
_SMALLEST_SLICE = 2**14
_STATE = "state"
_DESCRIPTION = "description"
_METADATA = "_CHECKPOINT_METADATA"
_WRITTEN = "written"  # a folder with a file of each process that has written its shards


class Committer:
    """Writes one checkpoint at a time. All processes of a run call the same methods in the same order, and get the
    same answers.
    """

    def __init__(
        self,
        wait_minutes: float,
        commit_minutes: float,
        before_commit: Callable[[], None] = lambda: None,
        **writing,
    ):
        """Nothing is written yet.

        Args:
          wait_minutes: how long each process may write.
          commit_minutes: how long process 0 may take to commit what all have written.
          before_commit: called by process 0 when all have written, in a thread.
          **writing: options of Orbax's handler of the state.
        """
        self._wait = wait_minutes
        self._commit_minutes = commit_minutes
        self._before_commit = before_commit
        # Each process alone, as far as Orbax knows, and without its files on how each process holds each array:
        # its barriers, and its wait for the folder of these files, do not notice failures.
        alone = ocp.options.MultiprocessingOptions(active_processes={processes.index()})
        arrays = ocp.type_handlers.ArrayHandler(
            array_metadata_store=None, min_slice_bytes_for_replica_parallel=_SMALLEST_SLICE
        )
        kinds = ocp.type_handlers.create_type_handler_registry(
            (jax.Array, arrays),
            (np.ndarray, ocp.type_handlers.NumpyHandler()),
            (np.number, ocp.type_handlers.ScalarHandler()),
        )
        self._handlers = {
            _STATE: ocp.PyTreeCheckpointHandler(
                multiprocessing_options=alone, type_handler_registry=kinds, **writing
            ),
            _DESCRIPTION: ocp.JsonCheckpointHandler(multiprocessing_options=alone),
        }
        self._save: concurrent.futures.Future | None = None
        self._commits: dict[epath.Path, concurrent.futures.Future] = {}  # of process 0

    @property
    def writing(self) -> bool:
        """Whether there is a save whose end `failures` has not returned yet."""
        return self._save is not None

    def committing(self) -> set[epath.Path]:
        """The checkpoints that process 0 still commits, although their time may be up."""
        return {folder for folder, commit in self._commits.items() if not commit.done()}

    def start(self, folder: epath.Path, tree: dict, description: dict) -> dict[int, str]:
        """Starts to save, and returns when the devices' memory may be reused.

        Args:
          folder: of the checkpoint, in its final place.
          tree: of arrays.
          description: JSON.

        Returns:
          Why the folder cannot be made, by process; nothing was started then.

        Raises:
          HostsError: the other processes cannot be reached.
        """
        unfinished = folder if places.in_bucket(folder) else _unfinished(folder)
        failed = self._in_all(
            "folder of a save", self._wait, lambda: self._make_folder(folder, unfinished)
        )
        if failed:
            return failed
        copied = threading.Event()
        arguments = {  # What is small comes first: its failure is known before the state is written.
            _DESCRIPTION: ocp.args.JsonSave(description),
            _STATE: ocp.args.PyTreeSave(tree),
        }
        self._save = _in_thread(lambda: self._write(folder, unfinished, arguments, copied))
        copied.wait()
        return {}

    def failures(self) -> dict[int, str]:
        """Waits for the save under way: why it has failed, by process; {} if it has not.

        Raises:
          HostsError: the other processes cannot be reached.
        """
        save = self._save
        self._save = None
        return save.result() if save else {}

    def close(self) -> None:
        """Frees the handlers' memory."""
        for handler in self._handlers.values():
            handler.close()

    def _make_folder(self, folder: epath.Path, unfinished: epath.Path) -> None:
        """Makes an empty folder, in process 0; in a bucket, where folders exist only in the names of objects, it
        writes one to try.
        """
        if processes.index():
            return
        if folder in self.committing():  # It would mark as whole what is written now.
            raise TimeoutError("an earlier commit of it has not ended yet")
        remove_checkpoint(folder)
        if places.in_bucket(folder):
            probe = folder / ".probe"
            places.write_whole(probe, b"")
            probe.unlink()
            return
        remove_checkpoint(unfinished)
        for name in self._handlers:
            (unfinished / name).mkdir(parents=True)
        if processes.count() > 1:
            (unfinished / _WRITTEN).mkdir()

    def _write(
        self, folder: epath.Path, unfinished: epath.Path, arguments: dict, copied: threading.Event
    ) -> dict[int, str]:
        began = time.time()
        failed = self._in_all(
            "write of a save", self._wait, lambda: self._write_own(unfinished, arguments, copied)
        )
        return failed or self._in_all(
            "commit of a save",
            self._commit_minutes,
            lambda: self._commit_in_time(folder, unfinished, began),
        )

    def _write_own(self, unfinished: epath.Path, arguments: dict, copied: threading.Event) -> None:
        async def write() -> None:
            try:
                writes = [
                    write
                    for name, argument in arguments.items()
                    for write in await self._handlers[name].async_save(
                        unfinished / name, args=argument
                    )
                ]
            finally:
                copied.set()
            deadline = time.monotonic() + 60 * self._wait
            # Orbax would count its own limit by the clock of the day, which may be set while it waits.
            for future in [_in_thread(write.result) for write in writes]:
                await asyncio.to_thread(future.result, max(deadline - time.monotonic(), 0))

        loop = asyncio.new_event_loop()
        try:
            loop.run_until_complete(write())
        except TimeoutError:
            raise TimeoutError(
                f"not written within {self._wait:g} minutes (config.hosts.wait_minutes)"
            ) from None
        finally:
            if asyncio.all_tasks(loop):  # A part has failed, and nobody waits for the others.
                _in_thread(lambda: _complete(loop))
            else:
                _complete(loop)
        if processes.count() > 1:
            places.write_whole(unfinished / _WRITTEN / str(processes.index()), "")

    def _commit_in_time(self, folder: epath.Path, unfinished: epath.Path, began: float) -> None:
        if processes.index():
            return
        commit = _in_thread(lambda: self._commit_now(folder, unfinished, began))
        under_way = {path: self._commits[path] for path in self.committing()}
        self._commits = under_way | {folder: commit}
        try:
            commit.result(60 * self._commit_minutes)
        except TimeoutError:
            if commit.done():  # That was storage's.
                raise
            raise TimeoutError(
                f"not committed within {self._commit_minutes:g} minutes (config.checkpoint.commit_minutes)"
            ) from None

    def _commit_now(self, folder: epath.Path, unfinished: epath.Path, began: float) -> None:
        self._before_commit()
        _check_parts(unfinished)
        for name, handler in self._handlers.items():
            handler.finalize(unfinished / name)
            # Orbax's readers of an item in a bucket expect it there too.
            places.write_whole(unfinished / name / COMMITTED, "")
        metadata = {
            "item_handlers": {name: handler.typestr() for name, handler in self._handlers.items()},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": int(began * 1e9),
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": {},
        }
        places.write_whole(unfinished / _METADATA, json.dumps(metadata))
        places.write_whole(unfinished / COMMITTED, "")
        if unfinished != folder:
            # Orbax's readers need small files that it does not sync: a machine that loses its power would keep the
            # name of the checkpoint, and nothing in them.
            for name in self._handlers:
                for file in (unfinished / name).iterdir():
                    _sync(file)
                _sync(unfinished / name)
            _sync(unfinished)
            unfinished.rename(folder)
            _sync(folder.parent)

    def _in_all(self, phase: str, minutes: float, action: Callable[[], None]) -> dict[int, str]:
        """Does a part of a save, which may take some minutes, and meets the other processes: why it has failed, by
        process.
        """
        failure = ""
        bug = None
        try:
            action()
        except Exception as error:
            # Storage fails as OSError, as errors of the clients of buckets, and as TensorStore's ValueError.
            failure = storage.why(error)
            if not (isinstance(error, ValueError | RuntimeError) or buckets.is_failure(error)):
                bug = error
        failed = processes.failures(phase, failure, minutes + _SLACK_MINUTES)
        if bug:  # The others know by now, and do not wait.
            raise bug
        return failed


def _check_parts(unfinished: epath.Path) -> None:
    """Raises `OSError` unless process 0 sees the marks of all processes in the folder, which it removes then."""
    if processes.count() == 1:
        return
    marks = {str(process) for process in range(processes.count())}
    missing = sorted(marks - set(places.names_in(unfinished / _WRITTEN)), key=int)
    if missing:
        raise FileNotFoundError(
            errno.ENOENT,
            f"the shards of process {', '.join(missing)} are not there; do all hosts see this folder",
            str(unfinished),
        )
    places.remove(unfinished / _WRITTEN)


def _complete(loop: asyncio.AbstractEventLoop) -> None:
    """Closes a loop when its tasks have ended. They are not cancelled: TensorStore would call the loop back after it
    is closed, which is printed for each array.
    """
    if tasks := asyncio.all_tasks(loop):
        loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


def _sync(path: epath.Path) -> None:
    """Returns once a file, or the names in a folder, are on the disk."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _unfinished(folder: epath.Path) -> epath.Path:
    return folder.with_name(f"{folder.name}{ocp.path.step.TMP_DIR_SUFFIX}")


def remove_checkpoint(folder: epath.Path) -> None:
    """Removes a checkpoint, whole or not; nothing, if it is not there."""
    if COMMITTED in (names := places.names_in(folder)) and places.in_bucket(folder):
        (folder / COMMITTED).unlink()  # first what makes it whole: this may be interrupted
    if names or not places.in_bucket(folder):
        places.remove(folder)


def _in_thread(action: Callable) -> concurrent.futures.Future:
    """What an action gives, in a thread that does not keep the program from ending."""
    future = concurrent.futures.Future()

    def run() -> None:
        try:
            future.set_result(action())
        except BaseException as error:  # noqa: BLE001  raised where the result is asked for
            future.set_exception(error)

    threading.Thread(target=run, name="vit_jax-save", daemon=True).start()
    return future
