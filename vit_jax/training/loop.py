"""Trains a model from a config: the loop and the order of what happens around it. One step is in `step.py`."""

import contextlib
import textwrap
from collections.abc import Callable, Sequence

import jax
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from vit_jax import evaluation
from vit_jax.base import logs
from vit_jax.base.errors import UserError
from vit_jax.base.lock import Lock
from vit_jax.checkpoints import saving, storage
from vit_jax.data import loader, sources
from vit_jax.data.record import Source
from vit_jax.devices import meshes, processes
from vit_jax.evaluation.contract import EvaluatedModel
from vit_jax.training import agreement, preflight
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, make_mesh, resolve
from vit_jax.training.guards import check_batch, make_deterministic, make_workdir
from vit_jax.training.starting import Start
from vit_jax.training.step import StepPrograms
from vit_jax.training.upkeep import announce
from vit_jax.training.upkeep.audit import CordonHost, WrongState
from vit_jax.training.upkeep.callbacks import Callback, Callbacks, check_callbacks
from vit_jax.training.upkeep.clock import Clock
from vit_jax.training.upkeep.device_checks import DeviceChecks
from vit_jax.training.upkeep.goals import Goals, find_metric_order
from vit_jax.training.upkeep.health import BadStep, NonFiniteError, SkippedData
from vit_jax.training.upkeep.preemption import Interrupted, StopRequest
from vit_jax.training.upkeep.programs import Programs
from vit_jax.training.upkeep.progress import Meter, Profiler, make_writers
from vit_jax.training.upkeep.save_times import SaveTimes
from vit_jax.training.upkeep.stragglers import Stragglers
from vit_jax.training.upkeep.writers import Writers
from vit_jax.training.with_data import assembly_for, describe_run, subject_of

# What is worth knowing of the time that it takes.
_COMPILING = "once for a model, a batch and a kind of devices; later starts take it from config.compilation_cache"


def train(
    config: ConfigDict, workdir: epath.PathLike, *, callbacks: Sequence[Callback] = ()
) -> dict[str, float]:
    """Trains, or continues training, in `workdir`, from any thread. It logs as the command does,
    unless the surrounding program or notebook has configured logging.

    The order matters:
    1. options of the model that the config leaves open are those of the checkpoint to start from;
       errors in the config or the data are reported before devices are used or files written;
    2. the parts of the run are put together; the state is described, not made;
    3. an earlier run in `workdir` is resumed: its step is all that is needed to continue with the same
       examples and the same randomness; otherwise the state is made in its shards, from `init_from`
       if that is given;
    4. steps are dispatched ahead of the devices; the host waits for them only where it logs,
       evaluates or saves.

    Args:
      config: of a recipe, see `load_config`.
      workdir: a folder, local or in a bucket.
      callbacks: functions of (step, metrics), called in process 0 wherever metrics are logged, with `eval/…` too. If
        one returns a true value, the run ends: it is saved, evaluated, and not continued later. If one raises, the
        run is saved and can be continued.

    Returns:
      The last evaluation's metrics and `step`, `seconds` (of training, all restarts together).

    Raises:
      ConfigError: see 1.
      Interrupted: SIGTERM, SIGINT or SIGHUP came; the state was saved.
      CheckpointError, NonFiniteError, BadImage: the run cannot continue; what was saved stays.
    """
    index = processes.index()
    logs.to_stderr_by_default(index if processes.count() > 1 else None, quiet=index > 0)
    check_callbacks(callbacks)
    workdir = storage.locate_to_save(workdir, "--workdir")
    config = resolve(config, workdir)
    make_deterministic(config)
    source = sources.open_train(config.data)
    assembly = assembly_for(config, source)
    suite = evaluation.make(config.eval.evaluators, subject_of(assembly, source))
    preflight.check_run(assembly, source, suite, workdir)
    agreement.check_run_agrees(assembly, source, suite)
    programs = Programs(config.compilation_cache, workdir)
    agreement.check_devices_agree(config)
    mesh = make_mesh(config)
    check_batch(config, mesh)
    if config.pseudo.teacher:
        from vit_jax.training import pseudo_labels

        source = pseudo_labels.add(source, assembly, workdir)
        assembly = assembly_for(config, source)
        suite = evaluation.make(config.eval.evaluators, subject_of(assembly, source))
    make_workdir(workdir)
    agreement.check_workdir_is_shared(workdir, config.hosts.wait_minutes)
    programs.fetch()

    clock = Clock(workdir, config.hosts, write=jax.process_index() == 0)
    lock = contextlib.nullcontext()
    if jax.process_index() == 0:
        lock = Lock(
            workdir, on_lost=lambda message: processes.abort_all(message, UserError.exit_code)
        )
    with StopRequest() as stop, lock, clock, jax.set_mesh(mesh):
        run = _Run(assembly, source, suite, mesh, workdir, clock, stop, programs, callbacks)
        return run.finish()


class _Run:
    """A run under way: its state, and all that looks after it."""

    def __init__(
        self,
        assembly: Assembly,
        source: Source,
        suite: evaluation.Suite,
        mesh: jax.sharding.Mesh,
        workdir: epath.Path,
        clock: Clock,
        stop: StopRequest,
        programs: Programs,
        callbacks: Sequence[Callback] = (),
    ):
        config = self.config = assembly.config
        self.assembly, self.source, self.suite, self.mesh = assembly, source, suite, mesh
        self.workdir, self.clock, self.stop, self.programs = workdir, clock, stop, programs
        self.callbacks = Callbacks(callbacks)
        self.description = describe_run(assembly, source)
        like = assembly.abstract_state(mesh)
        announce.announce(assembly, source, suite, like.params, workdir)
        kept, wait = config.checkpoint, config.hosts.wait_minutes
        # A resumed run does not log again what came before its checkpoint.
        self.checkpoints = saving.Checkpoints(workdir, kept, wait, lambda: self.writers.sync())
        self.tier = None
        if kept.local:
            from vit_jax.checkpoints.tiers import LocalTier

            self.tier = LocalTier(kept.local, workdir, like.parts(), wait)
        self.start = Start(assembly, self.checkpoints, self.tier, self.description, like)
        self.skipped_data = SkippedData(workdir)
        self.stragglers = Stragglers(clock)
        self.reference = None
        if config.reference.curve:
            from vit_jax.training.upkeep.reference import make_reference

            self.reference = make_reference(assembly, source, suite)
        self.profiler = Profiler(config.log.profile, workdir / "profile")
        self.train_step = StepPrograms(assembly.train_step, like, mesh, config.audit.checker_every)
        self.gather = states.make_gather(like)
        self.snapshots = None
        if any(map(assembly.to_steps, (config.log.images, config.log.histograms))):
            from vit_jax.training.upkeep.snapshots import Snapshots

            self.snapshots = Snapshots(assembly, mesh, source.classes)
        self.results: dict[str, float] = {}
        self.evaluated_at = -1
        self.checks = DeviceChecks(assembly, source, like, mesh)
        self.state = self._start()
        self.recipe = announce.keep_recipe(assembly, source, suite, workdir)
        saved = self.start.saved
        self.clock.resumed_from(saved["goodput"], saved["seconds"])
        self.order = find_metric_order(config, suite)
        if self.order:
            logging.info("evaluations are compared by %s", self.order.text())
        self._continue_from(saved)
        if self.ended:
            self.goals.log_ended(int(self.state.step), self.assembly.total_steps, self.ended)
        best = kept.best and self.goals.best
        self.checkpoints.keep_best(best["step"] if best else None)

    def finish(self) -> dict:
        """Trains from where the state is to the end of the run, or until a stop is requested."""
        step = int(self.state.step)
        to_files = make_writers(self.workdir, self.config, step)
        writers = self.writers = Writers(to_files, self.callbacks)
        saved = self.start.saved
        self.meter = Meter(
            self.assembly,
            len(self.source),
            writers,
            self.clock,
            step,
            saved.get("window", ()),
            saved.get("window_skipped"),
        )
        writers.write_texts(step, {"config": textwrap.indent(self.recipe, "    ")})
        try:
            while True:
                try:
                    return self._finish()
                except BadStep as bad:
                    self._roll_back(bad)
                except WrongState as wrong:
                    self._go_back(wrong)
        finally:
            self.meter.close()
            self.train_step.close()
            self.checkpoints.close()
            writers.close()
            self.clock.write()
            if self.tier:
                self.tier.close()
            self.programs.close()

    def _finish(self) -> dict:
        total, step = self.assembly.total_steps, int(self.state.step)
        if self.evaluation_is_due and not self.ended:
            self._evaluate(step)
            self.ended = self.goals.end_the_run()
        self.evaluation_is_due = False
        if not self.ended:
            with (
                loader.train_batches(
                    self.source,
                    self.config,
                    meshes.batch_sharding(self.mesh),
                    start_step=step,
                    stop_step=total,
                    skipped=self.skipped_data.ranges,
                ) as batches,
                self.stop.calling(batches.end),
            ):
                stopped = self._train(batches)
            step = int(self.state.step)
            if stopped and step < total:
                self._interrupt(step)
        # The last evaluation may fail, and no checkpoint holds its result: a next start makes it first.
        self.evaluation_is_due = self.evaluated_at != step
        self._save_now(step)
        self.callbacks.raise_error()
        if self.evaluated_at != step:
            self._evaluate(step)
            self.callbacks.raise_error()
        result = self.results | {"step": step, "seconds": self.clock.training_seconds}
        result |= {"best": self.goals.best, "goodput": self.clock.shares()}
        result |= {"reached": self.goals.reached} if self.config.eval.target is not None else {}
        announce.announce_end(self.workdir, result, self.clock)
        return result

    def _train(self, batches: loader.Batches) -> bool:
        """Trains on all batches, or until a stop is requested: whether it was."""
        config, total = self.config, self.assembly.total_steps
        kept = config.checkpoint
        durations = (config.log.every, config.eval.every, kept.every, kept.local_every)
        log_every, eval_every, save_every, local_every = map(self.assembly.to_steps, durations)
        self.meter.batches = batches
        first = int(self.state.step) + 1
        timed = SaveTimes(kept.every_minutes, first - 1)
        for step, batch in enumerate(self.clock.each(batches, "input"), first):
            self.profiler.before(step)
            if not self.train_step.is_compiled(batch):
                self._compile(step, batch)
            self._check_devices(step - 1, batch)
            # Any other transfer between host and devices in here would stall every step.
            with jax.transfer_guard("disallow"):
                if self.snapshots:
                    self.snapshots.before(step, self.state, batch)
                with self.clock.waiting():  # where steps already fill the devices' queue
                    self.state, metrics = self.train_step(step, self.state, batch)
            self.meter.add(step, metrics)
            self.profiler.after(step, metrics)
            self.checks.after(step, self.state)
            # A resumed run logs at the same steps as one that was not interrupted.
            logs = step in (1, total) or _due(step, log_every)
            if logs:
                with self.clock.waiting():
                    self._check_health(step)
                self.meter.log(step)
                self.stragglers.log(step)
                if self.snapshots:
                    self.snapshots.write(self.writers)
                self.clock.write()
            if self.stop.after_step():
                # The exit does not wait for it: the next start makes it first.
                self.evaluation_is_due = step < total and _due(step, eval_every)
                return True
            if step == total:  # saved first, and then evaluated, when the loader is closed
                return False
            if _due(step, eval_every):
                self._evaluate(step)
                if reason := self.goals.end_the_run():
                    self.ended = reason
                    return False
            if logs and self.callbacks.end_the_run():
                self.ended = self.callbacks.ended
                return False
            if self.tier and _due(step, local_every):
                self._save_by(self.tier.save, step)
            with self.clock.waiting():
                time_has_passed = timed.is_due(step)
            if _due(step, save_every) or time_has_passed:
                self._save_by(self.checkpoints.save, step)
                timed.saved(step)
        return self.stop.requested  # while it waited for a batch

    def _compile(self, step: int, batch: dict) -> None:
        """Has the step compiled for such a batch by all processes before any of them runs it: the first collective
        of one would not wait long for another that is still compiling.
        """
        with self.clock.during("compile"):
            with logs.with_elapsed_time("compiling the training step", about=_COMPILING):
                if not self.train_step.is_begun:
                    batches = self.assembly.abstract_batches(self.mesh)
                    if self.snapshots and len(batches) == 1:
                        self.snapshots.compile(self.state, batch)
                    self.train_step.compile(self.state, batches, batch)
                    self.checks.compile(self.state, batches)
                self.train_step.wait(batch)
            processes.barrier(f"compiled for step {step}", self.config.hosts.wait_minutes)
        self.programs.keep()
        self.clock.training()

    def _save_now(self, step: int) -> None:
        self._save_by(self.checkpoints.save_now, step)
        if self.tier:
            self.tier.discard()

    def _save_by(self, save: Callable, step: int) -> None:
        self._check_health()
        with self.clock.during("save", after=self.state):
            self.state = self.checks.verify(step, self.state)
            parts = self.state.parts()
            now = {
                "seconds": self.clock.training_seconds,
                "goodput": self.clock.read(),
                **self.goals.saved(),
                "ended": self.ended,
                "evaluation_is_due": self.evaluation_is_due,
                "window": self.meter.window(),
                "window_skipped": self.meter.skipped,
            }
            save(step, parts, self.description | now, self.checks.marks_of(parts))

    def _check_health(self, step: int | None = None) -> None:
        """Ends the run if it has to, and no device is at fault; where metrics of a step are due, they show why."""
        ranges = self.skipped_data.ranges
        try:
            self.state = self.checks.check_health(self.state, self.checkpoints.steps, ranges)
        except NonFiniteError as error:
            continues = isinstance(error, BadStep)  # from an earlier step
            if step is not None and not continues:
                self.meter.log(step, with_skipped=True)
            raise

    def _evaluate(self, step: int) -> None:
        line = logs.status(jax.process_index() == 0)
        with self.clock.during("evaluate", after=self.state), line:
            line.show(f"evaluating after step {step:,}")
            state = self.gather(self.state)
            trained = EvaluatedModel(state.weights(), state, state.own_weights())
            self.results = self.suite(
                trained, self.mesh, watch=lambda batches: self.clock.each(batches, "evaluate")
            )
        self.evaluated_at = step
        self.programs.keep()
        compared = self.reference.compare(step, self.results) if self.reference else None
        scalars = {f"eval/{name}": value for name, value in self.results.items()}
        self.meter.write(step, scalars | (compared.scalars if compared else {}))
        is_best = self.goals.add(step, self.results, self.clock)
        if is_best:
            self._keep_best(step)
        if compared:
            logging.info("%s", compared.sentence)
            self.writers.write_texts(step, {"reference": compared.sentence})
            if compared.error:
                raise compared.error

    def _keep_best(self, step: int) -> None:
        """Notes that the evaluation after `step` is the best, and keeps its checkpoint where the config says so."""
        is_kept = self.config.checkpoint.best
        if is_kept:
            self._save_by(self.checkpoints.save, step)
        self.goals.write_best(self.workdir)
        if is_kept:
            self.checkpoints.keep_best(step)

    def _interrupt(self, step: int) -> None:
        """Saves and says so. Raises `Interrupted`."""
        message = f"stopped by {self.stop.name} after step {step} of {self.assembly.total_steps}; "
        try:
            self._save_now(step)
        except (BadStep, WrongState) as bad:  # Found, or undone, by the next start.
            raise Interrupted(f"{message}not saved: {bad} Start again to continue") from bad
        raise Interrupted(f"{message}saved, start again to continue")

    def _check_devices(self, step: int, batch: dict) -> None:
        """Has devices checked after `step`, and ends the run if a host is at fault too often."""
        with self.clock.waiting():
            self.state = self.checks.before(step, self.state, batch)
        if cordon := self.checks.events.cordon:
            self._save_now(step)
            raise CordonHost(f"{cordon}. The state after step {step} is saved")

    def _start(self) -> states.TrainState:
        state = self.start()
        self.checks.start(int(state.step), state)
        return state

    def _continue_from(self, saved: dict) -> None:
        """Takes what a checkpoint says of the evaluations before it."""
        self.goals = Goals(self.config.eval, self.order, saved)
        self.ended = self.goals.ended_before(saved)
        self.evaluation_is_due = saved.get("evaluation_is_due", False)

    def _roll_back(self, bad: BadStep) -> None:
        """Goes back to the last checkpoint, and on without the data of a bad step."""
        back_to = self._restore()
        skip = self.assembly.to_steps(self.config.rollback_skip)
        self.skipped_data.add(bad, skip, self.config.max_rollbacks, back_to=back_to)

    def _go_back(self, wrong: WrongState) -> None:
        """Goes back to the last checkpoint, and on with the same data."""
        back_to = self._restore()
        if jax.process_index() == 0:
            where = f"to the checkpoint of step {back_to}" if back_to else "to the beginning"
            logging.error("%s. Going back %s; no data is skipped", wrong, where)

    def _restore(self) -> int:
        """Continues from the last checkpoint; returns its step, 0 for the beginning."""
        with self.clock.during("start"):
            self.state = self._start()
            saved = self.start.saved
            self.clock.resumed_from(saved["goodput"], saved["seconds"])
            self._continue_from(saved)
        step = int(self.state.step)
        self.meter.rewind(step, saved.get("window", ()), saved.get("window_skipped"))
        self.writers.rewind(step)
        return step


def _due(step: int, every: int) -> bool:
    """Whether what is done `every` steps (0: never) is done now."""
    return every > 0 and step % every == 0
