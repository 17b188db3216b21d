"""Trains a model from a config: the loop and the order of what happens around it. One step is in
`step.py`.
"""

import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator

import jax
from absl import logging
from clu import parameter_overview
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import paths
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import reading, saving
from vit_jax.data import loader, sources
from vit_jax.devices import meshes, processes
from vit_jax.evaluation import accuracy
from vit_jax.interchange import loading
from vit_jax.models import execution
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, assemble, resolve
from vit_jax.training.goodput import KINDS, Ledger
from vit_jax.training.guards import (
    changed_fields,
    check_batch,
    make_workdir,
    use_compilation_cache,
)
from vit_jax.training.networks import OWN
from vit_jax.training.preemption import StopRequest
from vit_jax.training.progress import Lost, Meter, Profiler, make_writers
from vit_jax.training.rollback import LeftOut
from vit_jax.training.step import compile_train_step
from vit_jax.training.watchdog import Watchdog


class Interrupted(UserError):
    """A signal asked the run to stop; its state is saved. Start it again to go on."""

    exit_code = 42


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, float]:
    """Trains, or goes on training, in `workdir`.

    The order matters:
    1. options of the model that the config leaves open are those of the checkpoint to start from;
       what is wrong with the config or the data is said before devices are used or files written;
    2. the parts of the run are put together, the state is described, not made;
    3. an earlier run in `workdir` is resumed: its step is all that is needed to go on with the same
       examples and the same randomness; otherwise the state is made in its shards, from `init_from`
       if that is given;
    4. steps are dispatched ahead of the devices; the host waits for them only where it logs,
       evaluates or saves.

    Returns:
      The last evaluation's metrics and `step`, `seconds` (of training, all restarts together).

    Raises:
      ConfigError: see 1.
      Interrupted: SIGTERM or SIGINT came; the state was saved.
      CheckpointError, NonFiniteError, BadImage: the run cannot go on; what was saved stays.
    """
    config = resolve(config, workdir)
    workdir = paths.locate(workdir)
    train_source = sources.open_train(config.data)
    eval_source = sources.open_eval(config.data)
    assembly = assemble(
        config,
        num_classes=len(train_source.classes),
        examples_per_epoch=len(train_source),
        multi_label=train_source.multi_label,
    )
    if train_source.classes != eval_source.classes:
        raise ConfigError(
            f"config.data: the classes of {config.data.train_split!r} and {config.data.eval_split!r} differ"
        )
    use_compilation_cache(config.compilation_cache)
    mesh = meshes.make_mesh(vars(config.mesh))
    check_batch(config, mesh)
    make_workdir(workdir)

    watchdog = Watchdog(config.hosts.step_minutes, config.hosts.other_minutes)
    with StopRequest() as stop, watchdog, jax.set_mesh(mesh):
        checkpoints = saving.Checkpoints(workdir, config.checkpoint, config.hosts.wait_minutes)
        description = reading.describe(
            config, assembly.model_config, train_source.classes, len(train_source)
        )
        like = assembly.abstract_state(mesh)
        _tell(assembly, like, mesh)
        ledger = Ledger(workdir, write=jax.process_index() == 0)
        start = _Start(assembly, checkpoints, description, like, ledger)
        state, seconds = start()
        writers = make_writers(workdir, config.log)
        meter = Meter(assembly, train_source, writers, seconds, start_step=int(state.step))
        run = _Run(
            assembly, mesh, train_source, eval_source, checkpoints, description, workdir, start,
            stop, state, meter, watchdog, ledger,
        )  # fmt: skip
        try:
            return run.finish()
        finally:
            meter.close()
            writers.close()
            ledger.write()
            checkpoints.close()


@dataclasses.dataclass
class _Run:
    """A run under way: its state, and all that looks after it."""

    assembly: Assembly
    mesh: jax.sharding.Mesh
    train_source: sources.Source
    eval_source: sources.Source
    checkpoints: saving.Checkpoints
    description: dict
    workdir: epath.Path
    start: "_Start"
    stop: StopRequest
    state: states.TrainState
    meter: Meter
    watchdog: Watchdog
    ledger: Ledger

    def __post_init__(self):
        assembly = self.assembly
        shardings = states.shardings_of(self.state)
        self.train_step = compile_train_step(assembly.train_step, shardings, self.mesh)
        self.compiled = False
        self.eval_step = accuracy.make_eval_step(
            assembly.definition, assembly.model_config, assembly.config, self.mesh
        )
        self.batch_sharding = meshes.batch_sharding(self.mesh)
        self.profiler = Profiler(assembly.config.log.profile, self.workdir / "profile")
        self.left_out = LeftOut(self.workdir)
        self.results: dict[str, float] = {}

    def finish(self) -> dict:
        """Trains from where the state is to the end of the run, or until a stop is requested."""
        while True:
            try:
                return self._finish()
            except Lost as lost:
                self._roll_back(lost)

    def _finish(self) -> dict:
        total = self.assembly.total_steps
        with loader.train_batches(
            self.train_source,
            self.assembly.config,
            self.batch_sharding,
            start_step=int(self.state.step),
            stop_step=total,
            left_out=self.left_out.ranges,
        ) as batches:
            stopped = self._train(batches)
        step = int(self.state.step)
        if stopped and step < total:
            told = f"stopped by {self.stop.name} after step {step} of {total}; "
            try:
                self._save_now(step)
            except Lost as lost:  # Found again after the next start, which goes back.
                raise Interrupted(f"{told}not saved: {lost} Start again to go on") from lost
            raise Interrupted(f"{told}saved, start again to go on")
        if not self.results:  # Resumed when all was done.
            self._evaluate(step)
        self._save_now(step)
        self.ledger.tell()
        result = self.results | {"step": step, "seconds": self.meter.seconds}
        result |= {"goodput": self.ledger.shares()}
        if jax.process_index() == 0:
            (self.workdir / "result.json").write_text(json.dumps(result) + "\n")
        return result

    def _train(self, batches: loader.Batches) -> bool:
        """Trains on all batches, or until a stop is requested: whether it was."""
        config, total = self.assembly.config, self.assembly.total_steps
        log_every, eval_every, save_every = map(
            self.assembly.to_steps, (config.log.every, config.eval.every, config.checkpoint.every)
        )
        first, saved_at = int(self.state.step) + 1, time.monotonic()
        for step, batch in enumerate(self.ledger.each(batches, "input"), first):
            self.profiler.before(step)
            if not self.compiled:
                self._compile(batch)
            # Whatever else is moved between host and devices in here would be a wait in every step.
            with jax.transfer_guard("disallow"):
                self.state, metrics = self.train_step(self.state, batch)
            self.meter.add(step, metrics)
            self.profiler.after(step, metrics)
            logs = step == first or _due(step, log_every, total)
            if logs:
                self.meter.log(step, self.state, batches, goodput=self.ledger.share())
                self.ledger.write()
            self.watchdog.alive()
            if self.stop.after_step():
                return True
            if _due(step, eval_every, total):
                self._evaluate(step)
            if _due(step, save_every, total) or (logs and self._time_to_save(saved_at)):
                self._save(step)
                saved_at = time.monotonic()
        return False

    @contextlib.contextmanager
    def _during(self, kind: str) -> Iterator[None]:
        """What is done in here is no step; `kind` of `goodput.KINDS`."""
        with self.ledger.during(kind), self.watchdog.during(KINDS[kind]), self.meter.paused():
            yield

    def _compile(self, batch: dict) -> None:
        """Has the step compiled by all processes before any of them runs it: the first collective
        of one would not wait long for another that is still compiling.
        """
        with self._during("compile"):
            self.train_step = self.train_step.lower(self.state, batch).compile()
            processes.barrier("compiled", self.assembly.config.hosts.wait_minutes)
        self.compiled = True
        self.ledger.training()

    def _time_to_save(self, saved_at: float) -> bool:
        """Whether `every_minutes` have passed; the clock of process 0 decides for all. Asked only
        where all wait for the devices anyway.
        """
        every = self.assembly.config.checkpoint.every_minutes
        due = (time.monotonic() - saved_at) / 60 >= every
        return every > 0 and processes.agree("save by time", str(due)) == "True"

    def _save(self, step: int) -> None:
        self._save_by(self.checkpoints.save, step)

    def _save_now(self, step: int) -> None:
        self._save_by(self.checkpoints.save_now, step)

    def _save_by(self, save: Callable, step: int) -> None:
        self.meter.check_health(self.state)
        with self._during("save"):
            now = {"seconds": self.meter.seconds, "goodput": dict(self.ledger.seconds)}
            save(step, self.state.parts(), self.description | now)

    def _evaluate(self, step: int) -> None:
        config = self.assembly.config
        with (
            self._during("evaluate"),
            loader.eval_batches(self.eval_source, config, self.batch_sharding) as batches,
        ):
            watched = self.watchdog.each(batches, KINDS["evaluate"])
            self.results = accuracy.evaluate(
                self.eval_step, self.state.weights(), watched, self.mesh
            )
        self.meter.write(step, {f"eval/{name}": value for name, value in self.results.items()})

    def _roll_back(self, lost: Lost) -> None:
        config = self.assembly.config
        with self._during("start"):
            skip = self.assembly.to_steps(config.rollback_skip)
            self.left_out.add(lost, skip, config.max_rollbacks)
            self.state, _ = self.start()
        self.meter.rewind(int(self.state.step))


def _due(step: int, every: int, total: int) -> bool:
    """Whether what is done `every` steps (0: never) is done now; at the end everything is."""
    return step == total or (every > 0 and step % every == 0)


@dataclasses.dataclass
class _Start:
    """The state to go on from: that of the newest good checkpoint, or else the first."""

    assembly: Assembly
    checkpoints: saving.Checkpoints
    description: dict
    like: states.TrainState
    ledger: Ledger

    def __call__(self) -> tuple[states.TrainState, float]:
        """The state, and the seconds of training before it."""
        self.saved = {"seconds": 0.0, "goodput": dict.fromkeys(KINDS, 0.0)}
        restored = self.checkpoints.restore_latest(self.like.parts(), self._same_run)
        self.ledger.resumed_from(self.saved["goodput"])
        if restored:
            logging.info("resumed at step %d of %d", restored[0], self.assembly.total_steps)
            state = self.like.with_parts(restored[1])
            return self._with_teacher(state), self.saved["seconds"]
        state = states.create(self.assembly.init, self.assembly.config.seed, self.like)
        if self.assembly.config.init_from:
            state = start_from(self.assembly, state)
        return self._with_teacher(state), 0.0

    def _with_teacher(self, state: states.TrainState) -> states.TrainState:
        """`state` with the weights of a fixed teacher, which are not saved with it."""
        teacher = self.assembly.networks.teacher
        if teacher is None:
            return state
        params = loading.load_params(
            teacher.path, self.like.fixed.params, teacher.config, reset=(), resize="scipy",
            where="config.objective.teacher", option="",
        )  # fmt: skip
        return state.replace(fixed=self.like.fixed._replace(params=params))

    def _same_run(self, saved: dict) -> None:
        """Raises `ConfigError` if the run that was saved is another one."""
        self.saved |= saved
        changed = changed_fields(saved, self.description)
        if not changed:
            return
        told = f"the config differs from the one this run was started with, in {'; '.join(changed)}"
        if self.assembly.config.checkpoint.on_config_change == "error":
            raise ConfigError(
                f"{told}. Use another --workdir, or --config.checkpoint.on_config_change=allow"
            )
        if jax.process_index() == 0:
            logging.warning("%s; going on, as config.checkpoint.on_config_change says", told)


def start_from(assembly: Assembly, state: states.TrainState) -> states.TrainState:
    """`state` with the parameters of `config.init_from` in place of the new ones, except those to
    reset.
    """
    config = assembly.config
    own = {name: tree for name, tree in state.params.items() if name == OWN}
    params = own | loading.load_params(
        config.init_from,
        state.weights().params,
        assembly.model_config,
        reset=config.init_reset,
        resize=config.init_resize,
    )
    copied = jax.tree.map(lambda p: p.copy(), params)
    return state.replace(
        params=params,
        ema=None if state.ema is None else copied,
        teacher=None if state.teacher is None else copied,
    )


def _tell(assembly: Assembly, like: states.TrainState, mesh: jax.sharding.Mesh) -> None:
    """What is about to run: parameters, devices, steps."""
    if jax.process_index() == 0:
        overview = parameter_overview.get_parameter_overview(like.params, include_stats="sharding")
        logging.info("parameters:\n%s", overview)
    devices = mesh.devices.flat
    logging.info(
        "%s: %d steps of %d images on %d x %s, mesh %s", assembly.config.model.name, assembly.total_steps,
        assembly.config.batch_size, mesh.size, devices[0].device_kind, dict(mesh.shape),
    )  # fmt: skip
    logging.info("%s", execution.told(assembly.model_config, mesh))
