"""`vit_jax evaluate --follow`: evaluates the checkpoints of a run as they appear, in processes of its own
beside those that train. What it finds is in WORKDIR/evaluations/NAME.jsonl, which is also what tells it
after a restart which checkpoints are done, and in WORKDIR/tensorboard/NAME.
"""

import contextlib
import dataclasses
import json
import re
import signal
import threading
import time
from collections.abc import Iterator

import jax
from absl import logging
from etils import epath

from vit_jax import evaluation
from vit_jax.base import buckets, durations, lock, places, schema
from vit_jax.base.errors import CheckpointError, ConfigError, UserError
from vit_jax.base.schema import nearest
from vit_jax.base.settings import change, named_entries
from vit_jax.checkpoints import pins, reading
from vit_jax.config import Config, default_config
from vit_jax.devices import meshes, processes
from vit_jax.evaluation import run as running
from vit_jax.evaluation import suites
from vit_jax.evaluation.contract import Watch
from vit_jax.prediction.overrides import check_changes, load_to_evaluate
from vit_jax.training.guards import make_workdir
from vit_jax.training.upkeep.series import Series

_DEFAULT_NAME = "evaluation"
# What a workdir may hold before there is a checkpoint in it.
_OF_A_RUN = (reading.FOLDER, "config.py", "metrics.jsonl", "goodput.json", "logs", lock.NAME)
# Settings that change how fast an evaluation is, not what it finds.
_SPEED = {"batch_size", "eval.batch_size", "data.threads", "data.read_ahead", "data.cache"}
_FIRST_SECONDS, _MOST_SECONDS = 1.0, 60.0  # between two looks at the folder
_REPORT_SECONDS = 600.0  # how often a long wait is reported
_GONE_SECONDS = 600.0  # how long a folder that cannot be read is tried
_LOCK_SECONDS = (
    15.0  # to wait for another process that writes the same series and may be about to end
)
_TRIES = 3  # to read a checkpoint


class Stopped(UserError):
    """A signal asked to stop. Start it again to continue."""

    exit_code = processes.START_AGAIN


@dataclasses.dataclass(frozen=True)
class What:
    """What each checkpoint is evaluated on.

    Attributes:
      settings: (field, value) of the run's config, see `load_to_evaluate`.
      suite: see `suites.make`; '': the config's evaluators.
      data_dir: see `suites.make`.
      name: of the series; '': the suite's, the evaluators', or 'evaluation'.
    """

    settings: tuple[tuple[str, str], ...] = ()
    suite: str = ""
    data_dir: str = ""
    name: str = ""

    def check(self) -> None:
        """Raises `ConfigError` for what is wrong whatever the run is, before it is waited for."""
        if self.suite and self.suite not in suites.SUITES:
            raise ConfigError(
                f"--suite={self.suite}: there is no such suite{nearest(self.suite, suites.SUITES)}; "
                f"set one of {', '.join(suites.SUITES)}"
            )
        check_changes(self.settings)
        for evaluator in self._evaluators():
            if evaluator not in evaluation.EVALUATORS:
                raise ConfigError(
                    f"there is no evaluator {evaluator!r}{nearest(evaluator, evaluation.EVALUATORS)}; set "
                    f"one of {', '.join(evaluation.EVALUATORS)}"
                )
        if self.name and not re.fullmatch(r"\w[\w.+-]*", self.name):
            raise ConfigError(
                f"--name={self.name} names a file: set letters, digits, '_', '-', '+' and '.'"
            )

    def series(self) -> str:
        """`name`, or what stands for it."""
        return self.name or self.suite or "+".join(self._evaluators()) or _DEFAULT_NAME

    def marks(self) -> dict:
        """What must be the same in all lines of a series."""
        changed = {n: v for n, v in self.settings if n not in _SPEED}
        return {"suite": self.suite, "data_dir": self.data_dir, "settings": changed}

    def _evaluators(self) -> list[str]:
        """The names of those that are set. Raises `ConfigError` for settings that no config takes."""
        config = default_config()
        change(config, Config, list(self.settings))
        return [name for name, _ in named_entries("eval.evaluators", config.eval.evaluators)]


def follow(workdir: epath.PathLike, what: What, watch: Watch = iter) -> dict:
    """Evaluates each checkpoint of a run once, until the run is done.

    Args:
      workdir: of the run, which may not have begun.
      what: to evaluate.
      watch: see `Evaluator`.

    Returns:
      `evaluations` (the file), `steps` evaluated now, `skipped` (by step, why), and the metrics of the last.

    Raises:
      ConfigError: it is not a run's workdir, or `what` does not go with the run.
      Stopped: SIGTERM came.
      UserError: the workdir cannot be read any more.
    """
    what.check()
    workdir = places.locate(workdir, "--checkpoint")
    _check_workdir(workdir)
    name = what.series()
    held, pin = contextlib.nullcontext(), pins.Pin(workdir, name)
    make_workdir(workdir / pins.FOLDER, "--checkpoint")
    if processes.index() == 0:
        held = lock.Lock(
            workdir / pins.FOLDER,
            name=pins.lock_name(name),
            patience=_LOCK_SECONDS,
            busy="another process follows this run and writes to {folder} ({holder}): set another --name",
        )
    with _stopped_by_sigterm(), held, Series(workdir, name, what.marks()) as series:
        try:
            return _Follower(workdir, what, watch, series, pin).run()
        finally:
            if processes.index() == 0:
                pin.release()


def text(result: dict) -> str:
    """`follow`'s result for a person."""
    steps, skipped = result["steps"], result["skipped"]
    lines = [f"skipped checkpoint {step}: {why}" for step, why in skipped.items()]
    count = f"{len(steps)} checkpoint{'s' * (len(steps) != 1)}"
    return "\n".join([*lines, f"evaluated {count}: {result['evaluations']}"])


class _Follower:
    """A run that is followed.

    Attributes:
      skipped: why, by step.
    """

    def __init__(
        self, workdir: epath.Path, what: What, watch: Watch, series: Series, pin: pins.Pin
    ):
        self._workdir, self._what, self._watch, self._series = workdir, what, watch, series
        self._pin, self._unread = pin, 0  # the step from which on the run is asked to keep all
        self._folder = workdir / reading.FOLDER
        self._seen: set[int] = set()
        self._failures: dict[int, int] = {}
        self.skipped: dict[int, str] = {}
        self._judges, self._made_for = None, None
        self._mesh = meshes.replica_mesh()

    def run(self) -> dict:
        """Evaluates until the run is done."""
        steps, metrics = [], {}
        if self._series.done:
            logging.info("%s has steps %s already", self._series.path, _listed(self._series.done))
        pause = _Pause(self._folder)
        while True:
            step = self._agreed(lambda: self._next(pause))
            if step is None:
                break
            if step < 0:
                continue
            new_metrics = self._evaluate(step)
            if new_metrics is not None:
                steps, metrics = [*steps, step], new_metrics
                pause.reset()
        logging.info("the run in %s is done", self._workdir)
        result = {"evaluations": str(self._series.path), "steps": steps}
        return result | {"skipped": {str(s): why for s, why in self.skipped.items()}} | metrics

    def _agreed(self, find) -> int | None:
        """What `find` gives in the first process, in all."""
        answer = json.dumps(find()) if processes.index() == 0 else ""
        return json.loads(processes.broadcast_from_first("followed run", answer))

    def _next(self, pause: "_Pause") -> int | None:
        """The step to evaluate now; `None`: the run is done; -1: look again. Waits in between."""
        try:
            saved = reading.saved_steps(self._folder)
            if not saved and self._seen and not self._workdir.exists():
                raise FileNotFoundError(f"{self._workdir} does not exist any more")
            self._pin.keep_from(self._unread)
            self._skip_removed(saved)
            todo = [s for s in saved if s not in self._series.done and s not in self.skipped]
            self._unread = min(todo, default=max(self._seen, default=-1) + 1)
            pause.readable()
            if not todo and self._is_done():
                return None
        except Exception as error:
            if not buckets.is_failure(error):
                raise
            pause.unreadable(error)
            return -1
        fresh = [step for step in todo if not self._failures.get(step)]
        if fresh:
            return fresh[0]
        pause.wait(max(self._seen, default=None))
        return todo[0] if todo else -1

    def _skip_removed(self, saved: list[int]) -> None:
        gone = self._seen - set(saved) - self._series.done - set(self.skipped)
        for step in sorted(gone):
            self._skip(step, "it was removed before it was evaluated (config.checkpoint.keep)")
        self._seen |= set(saved)

    def _skip(self, step: int, why: str) -> None:
        self.skipped[step] = why
        logging.warning("checkpoint %d of %s is skipped: %s", step, self._workdir, why)

    def _evaluate(self, step: int) -> dict[str, float] | None:
        """The metrics of a checkpoint, once they are written; `None` if it cannot be read."""
        folder = self._folder / str(step)
        try:
            run, config = load_to_evaluate(
                folder, self._what.settings, needs_data=not self._what.suite
            )
        except Exception as error:  # also what storage says of files that the run removes meanwhile
            if not (isinstance(error, CheckpointError) or buckets.is_failure(error)):
                raise
            self._failures[step] = self._failures.get(step, 0) + 1
            if self._failures[step] >= _TRIES:
                self._skip(step, str(error))
            else:
                logging.warning("checkpoint %d cannot be read: %s", step, error)
            return None
        if self._made_for != (run.model_config, config):
            what = self._what
            self._judges, _ = running.make_judges(run, config, what.suite, what.data_dir)
            self._made_for = (run.model_config, config)
        began = time.monotonic()
        trained = running.evaluated(run)
        with jax.set_mesh(self._mesh):
            metrics = self._judges(trained, self._mesh, self._watch)
        seconds = time.monotonic() - began
        self._series.write(step, metrics, seconds)
        logging.info(
            "step %d  %s  (%s)", step, running.text(metrics), durations.duration_text(seconds)
        )
        return metrics

    def _is_done(self) -> bool:
        """Whether the run has saved its last checkpoint, and no process trains in its workdir."""
        newest = max(self._series.done | set(self.skipped), default=None)
        if newest is None or newest < max(self._seen, default=newest):
            return False
        result = places.read_json(self._workdir / "result.json") or {}
        if result.get("step") != newest and not self._is_last(newest):
            return False
        return not lock.is_held(self._workdir)

    def _is_last(self, step: int) -> bool:
        """Whether a checkpoint says that it is its run's last."""
        try:
            description = reading.read_description(self._folder / str(step))
        except CheckpointError:
            return False
        config = schema.fill(default_config(), description["config"])
        total = durations.steps(
            config.duration,
            batch_size=config.batch_size,
            examples_per_epoch=description["training_examples"],
        )
        return bool(description.get("ended")) or step >= total


class _Pause:
    """Waits between two looks at a folder, longer each time, and reports what it waits for."""

    def __init__(self, folder: epath.Path):
        self._folder = folder
        self._unreadable_since: float | None = None
        self.reset()

    def reset(self) -> None:
        """Starts again with short waits."""
        self._seconds, self._reported = _FIRST_SECONDS, None

    def wait(self, newest: int | None) -> None:
        """Waits; `newest`: the step of the newest checkpoint so far."""
        now = time.monotonic()
        if self._reported is None or now - self._reported >= _REPORT_SECONDS:
            self._reported = now
            what = "the first checkpoint" if newest is None else f"a checkpoint after step {newest}"
            logging.info("waiting for %s in %s", what, self._folder)
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.5, _MOST_SECONDS)

    def readable(self) -> None:
        """Notes that the folder could be read."""
        self._unreadable_since = None

    def unreadable(self, error: Exception) -> None:
        """Waits where it could not. Raises `UserError` if that lasts."""
        now = time.monotonic()
        self._unreadable_since = self._unreadable_since or now
        if now - self._unreadable_since >= _GONE_SECONDS:
            raise UserError(
                f"{self._folder} could not be read for {durations.duration_text(_GONE_SECONDS)}: "
                f"{buckets.reason(error)}. Start the same command again when it is there: it continues with "
                "the next checkpoint"
            )
        why = buckets.reason(error)
        logging.warning("%s cannot be read (%s): trying again", self._folder, why)
        time.sleep(self._seconds)
        self._seconds = min(self._seconds * 1.5, _MOST_SECONDS)


def _check_workdir(workdir: epath.Path) -> None:
    """Raises `ConfigError` unless this is a run's workdir, or may become one."""
    parts = workdir.parts[-2:]
    inside = parts[-1:] == (reading.FOLDER,) or parts[0] == reading.FOLDER
    if inside or (workdir / "description").exists():
        raise ConfigError(
            f"--checkpoint={workdir} is one checkpoint or the folder of all: with --follow set "
            "--checkpoint=WORKDIR, the run's --workdir"
        )
    if workdir.is_dir():
        entries = {entry.name for entry in workdir.iterdir()}
        if entries and not entries & {*_OF_A_RUN, pins.FOLDER}:
            raise ConfigError(
                f"--checkpoint={workdir} is not a run's workdir: it holds neither {reading.FOLDER} nor "
                "config.py. With --follow set --checkpoint=WORKDIR, the run's --workdir"
            )
    elif workdir.exists():
        raise ConfigError(
            f"--checkpoint={workdir} is a file: with --follow set --checkpoint=WORKDIR, the run's --workdir"
        )
    elif not places.in_bucket(workdir) and not workdir.parent.is_dir():
        raise ConfigError(
            f"--checkpoint={workdir}: there is no folder {workdir.parent}"
            f"{places.nearest_existing(workdir.parent)}"
        )


@contextlib.contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Turns SIGTERM into `Stopped`, in the main thread, which alone may handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_) -> None:
        # Unlike an `Exception`, it passes through code that handles errors of storage.
        raise _Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    except _Terminated:
        raise Stopped(
            "stopped by SIGTERM: start the same command again to continue with the next checkpoint"
        ) from None
    finally:
        signal.signal(signal.SIGTERM, before)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came."""


def _listed(steps: set[int]) -> str:
    steps = sorted(steps)
    few = ", ".join(map(str, steps[-5:]))
    return few if len(steps) <= 5 else f"…, {few} ({len(steps)} in all)"
