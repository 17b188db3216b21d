"""Writing a run's checkpoints beside training: when a save has failed, what is deleted, which is the
last good one. How one is written is in `committing`, what is in them in `reading`.
"""

import json
import logging as python_logging
import os
import time
import traceback
from collections.abc import Callable

import orbax.checkpoint as ocp
from absl import logging
from etils import epath

from vit_jax.base import buckets, places
from vit_jax.checkpoints import descriptions, fingerprints, pins
from vit_jax.checkpoints.committing import Committer, remove_checkpoint
from vit_jax.checkpoints.reading import (
    COMMITTED,
    FOLDER,
    CheckpointError,
    everywhere,
    read_description,
    read_parts,
    saved_steps,
)
from vit_jax.config import Checkpoint
from vit_jax.devices import processes

DAMAGED = "damaged"
_RETRY_SECONDS = 5


class Checkpoints:
    """Saves a run's states beside training and finds the last good one again.

    All processes of a run call the same methods in the same order, and all get the same answers. A
    checkpoint exists once its directory has its final name, which Orbax gives it when everything is
    written.
    """

    def __init__(
        self,
        workdir: epath.PathLike,
        config: Checkpoint,
        wait_minutes: float = processes.WAIT_MINUTES,
        before_commit: Callable[[], None] = lambda: None,
        **writing,
    ):
        """Makes the folder, and deletes what an earlier run left unfinished.

        Args:
          config: the section `checkpoint`.
          wait_minutes: how long processes wait for each other's writes.
          before_commit: called by process 0, in a thread, before a checkpoint is whole.
          **writing: options of Orbax's handler of the state.
        """
        self._folder = places.locate(workdir) / FOLDER
        self._config = config
        self._wait = wait_minutes
        self._newest: int | None = None  # step of the newest state that is or is being saved
        self._failures = 0
        self._best: int | None = None
        self._committer = Committer(wait_minutes, config.commit_minutes, before_commit, **writing)
        for logger in (logging.get_absl_logger(), python_logging.getLogger("asyncio")):
            logger.addFilter(_not_a_traceback_of_orbax)
        if processes.index() == 0:
            if not places.in_bucket(self._folder):
                self._folder.mkdir(parents=True, exist_ok=True)
            self._delete(self._unfinished)

    @property
    def workdir(self) -> epath.Path:
        """The folder of the run."""
        return self._folder.parent

    def steps(self) -> list[int]:
        """The steps that have a whole checkpoint, oldest first."""
        steps = json.dumps(saved_steps(self._folder)) if _first() else ""
        return json.loads(processes.broadcast_from_first("steps", steps, self._wait))

    def keep_best(self, step: int | None) -> None:
        """Keeps the checkpoint of this step from now on, whatever its age, and no longer an earlier
        best one, which is deleted when the write under way has ended.
        """
        self._best = step
        if _first() and not self._committer.writing:
            self._delete(self._superfluous)

    def save(self, step: int, parts: dict, description: dict, marks: dict | None = None) -> None:
        """Starts to save; the write continues beside training.

        A save that fails is logged, and the next one is tried as usual; the last good checkpoint
        stays.

        Args:
          step: steps trained.
          parts: the state's, by name; trees of arrays.
          description: see `descriptions.describe`.
          marks: the `fingerprint` of the parts, where it is known already.

        Raises:
          CheckpointError, ConfigError, buckets.Unreachable: `config.max_failures` saves in a row have
            failed.
        """
        if step == self._newest:
            return
        self._settle()
        self._newest = step
        marks = marks or fingerprints.fingerprint(parts)
        tree = parts | {fingerprints.PART: fingerprints.sums_of_bits(marks)}
        described = {fingerprints.FIELD: fingerprints.described(marks), descriptions.STEP: step}
        description = description | described
        folder = self._folder / str(step)
        if failures := self._committer.start(folder, tree, descriptions.sealed(description)):
            self._end_of_save(failures)

    def save_now(
        self, step: int, parts: dict, description: dict, marks: dict | None = None
    ) -> None:
        """Saves and returns when everything is on disk; a save that fails is tried again.

        Raises:
          CheckpointError: see `save`.
        """
        while True:
            self.save(step, parts, description, marks)
            self._settle()
            if self._newest == step:
                return
            time.sleep(_RETRY_SECONDS)

    def close(self) -> None:
        """Ends the threads that write, when they have written."""
        # An error that ends a run of several processes may leave a write that others never finish.
        failures = self._committer.failures() if processes.count() == 1 else {}
        for failure in failures.values():
            logging.error("cannot write the checkpoint of step %d: %s", self._newest, failure)
        self._committer.close()

    def restore_latest(
        self,
        like: dict,
        before_restore: Callable[[dict, epath.Path], None] = lambda description, folder: None,
        elsewhere: Callable[[list[int]], tuple[int, dict] | None] = lambda steps: None,
    ) -> tuple[int, dict] | None:
        """The newest state that can be read whole.

        A damaged checkpoint is reported, moved to WORKDIR/damaged_checkpoints/STEP-TIME, and the
        one before is tried.

        Args:
          like: shapes, dtypes and shardings of the parts, by name.
          before_restore: called with the description of each candidate and its folder. What it raises goes
            through, except a `CheckpointError`, after which the candidate is damaged.
          elsewhere: gives (step, parts) of a state that is newer than the newest of these steps and
            lies in no checkpoint here. Asked before each candidate, and when none is left.

        Returns:
          (step, parts), or `None` where there is no checkpoint at all.

        Raises:
          CheckpointError: there are checkpoints, and none is good. They stay where they are.
        """
        self._settle()
        reasons = {}
        steps = self.steps()
        while True:
            if other := elsewhere(steps):
                self._set_aside(reasons, other[0])
                self._newest = None  # It may have been set aside: then its step is saved again.
                return other
            if not steps:
                break
            step = steps.pop()
            folder = self._folder / str(step)
            try:
                description = everywhere(lambda folder=folder: read_description(folder))
                before_restore(description, folder)
                parts = read_parts(folder, like, description)
            except CheckpointError as error:
                reasons[step] = error
                continue
            self._set_aside(reasons, step)
            self._newest = step
            return step, parts
        if reasons:
            details = "\n".join(f"  step {step}: {reason}" for step, reason in reasons.items())
            raise CheckpointError(
                f"no checkpoint in {self._folder} can be read; nothing was changed there:\n{details}"
            )
        return None

    def _settle(self) -> None:
        """Waits for the write under way and records how it ended."""
        if self._committer.writing:
            self._end_of_save(self._committer.failures())

    def _end_of_save(self, failures: dict[int, str]) -> None:
        """Counts and logs a save that has ended, and deletes what it leaves behind.

        Args:
          failures: what went wrong, by process.

        Raises:
          CheckpointError, ConfigError, buckets.Unreachable: too many saves in a row have failed.
        """
        step = self._newest
        if not failures:
            self._failures = 0
            if _first():
                self._delete(self._superfluous)
            return
        self._newest = None
        self._failures += 1
        if _first():
            self._delete(self._unfinished)
            if not places.in_bucket(
                self._folder
            ):  # What followers hold may be what fills the disk.
                self._delete(self._superfluous)
        reasons = "; ".join(
            f"process {process}: {failure}" if processes.count() > 1 else failure
            for process, failure in sorted(failures.items())
        )
        message = f"cannot write the checkpoint of step {step} to {self._folder}: {reasons}"
        most = self._config.max_failures
        if self._failures >= most:
            message += f". These were {most} failures in a row (config.checkpoint.max_failures)"
            if places.in_bucket(self._folder):
                raise buckets.kind_of(message)(
                    f"{message}. Check the network and this account's permissions, and start again: the "
                    "last good checkpoint is kept"
                )
            raise CheckpointError(
                f"{message}. Free or enlarge the disk and start again: the last good checkpoint is kept"
            )
        if _first():
            logging.error(
                "%s. Training continues, the last good checkpoint is kept, and the next save is tried: "
                "failure %d of %d in a row", message, self._failures, most,
            )  # fmt: skip

    def _superfluous(self) -> list[epath.Path]:
        steps = saved_steps(self._folder)
        keep_every = self._config.keep_every
        old = steps[: -self._config.keep]
        old = [step for step in old if not keep_every or step % keep_every]
        old = [step for step in old if step != self._best]
        if not self._failures or places.in_bucket(self._folder):
            most = self._config.keep_for_followers
            old = sorted(set(old) - pins.pinned(self._folder.parent, old, most))
        return [self._folder / str(step) for step in old]

    def _unfinished(self) -> list[epath.Path]:
        whole = {str(step) for step in saved_steps(self._folder)}
        committing = {folder.name for folder in self._committer.committing()}
        unfinished = []
        for name in places.names_in(self._folder):
            final_name, is_temporary, _ = name.partition(ocp.path.step.TMP_DIR_SUFFIX)
            lacks_commit = name.isdigit() and name not in whole
            if (is_temporary or lacks_commit) and final_name not in committing:
                unfinished.append(self._folder / name)
        return unfinished

    def _delete(self, find: Callable[[], list[epath.Path]]) -> None:
        def delete() -> None:
            for folder in find():
                remove_checkpoint(folder)

        try:
            delete()
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            why = buckets.reason(error)
            logging.warning("cannot delete old checkpoints in %s: %s", self._folder, why)

    def _set_aside(self, reasons: dict[int, Exception], good: int) -> None:
        for step, reason in reasons.items() if _first() else ():
            folder = self._folder / str(step)
            aside = self._folder.parent / f"{DAMAGED}_{FOLDER}" / f"{step}-{int(time.time())}"
            in_bucket = places.in_bucket(folder)
            done = "marked it as unfinished" if in_bucket else f"moved it to {aside}"
            message = "checkpoint of step %d is damaged (%s); going back to step %d, %s"
            logging.warning(message, step, reason, good, done)
            if in_bucket:  # A folder cannot be renamed there, only each of its files.
                (folder / COMMITTED).unlink()
            else:
                aside.parent.mkdir(exist_ok=True)
                folder.rename(aside)
        processes.barrier("damaged checkpoints", self._wait)


def _not_a_traceback_of_orbax(record: python_logging.LogRecord) -> bool:
    """A failed save is logged here, in a line; Orbax would log it too, twice and as tracebacks, and asyncio each array
    that was not written either.
    """
    if not record.exc_info:
        return True
    files = [record.pathname]
    if record.name == "asyncio":
        files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(record.exc_info[2])]
    return not any(f"{os.sep}orbax{os.sep}" in file for file in files)


def _first() -> bool:
    return processes.index() == 0
