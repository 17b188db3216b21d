"""Sets a run up: everything is checked, its parts are made, and its state is found or initialised."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax import evaluation
from vit_jax.base import logs
from vit_jax.base.errors import UserError
from vit_jax.base.lock import Lock
from vit_jax.checkpoints import saving, storage
from vit_jax.config import Config
from vit_jax.data import sources
from vit_jax.data.record import Source
from vit_jax.devices import processes
from vit_jax.training import agreement, preflight
from vit_jax.training.actions import make_actions
from vit_jax.training.actions.contract import Progress
from vit_jax.training.assembly import Assembly, make_mesh, resolve
from vit_jax.training.guards import check_batch, make_deterministic, make_workdir
from vit_jax.training.inputs import seed_key
from vit_jax.training.run import Run
from vit_jax.training.starting import Start
from vit_jax.training.state import TrainState
from vit_jax.training.step_programs import StepPrograms
from vit_jax.training.upkeep import announce
from vit_jax.training.upkeep.callbacks import Callback, Callbacks, check_callbacks
from vit_jax.training.upkeep.clock import Clock
from vit_jax.training.upkeep.device_checks import DeviceChecks
from vit_jax.training.upkeep.health import SkippedData
from vit_jax.training.upkeep.preemption import StopRequest
from vit_jax.training.upkeep.programs import Programs
from vit_jax.training.upkeep.progress import make_writers
from vit_jax.training.upkeep.writers import Writers
from vit_jax.training.with_data import assembly_for, describe_run, subject_of

if TYPE_CHECKING:
    from vit_jax.checkpoints.tiers import LocalTier


@contextlib.contextmanager
def open_run(
    config: ConfigDict, workdir: epath.PathLike, callbacks: Sequence[Callback]
) -> Iterator[Progress]:
    """A run before its next step; inside, it holds its workdir. See `loop.train`."""
    index = processes.index()
    logs.to_stderr_by_default(index if processes.count() > 1 else None, quiet=index > 0)
    check_callbacks(callbacks)
    workdir = storage.locate_to_save(workdir, "--workdir")
    assembly, source, suite = _check(resolve(config, workdir), workdir)
    config = assembly.config
    programs = Programs(config.compilation_cache, workdir)
    agreement.check_devices_agree(config)
    mesh = make_mesh(config)
    check_batch(config, mesh)
    if config.pseudo.teacher:
        from vit_jax.training import pseudo_labels

        source = pseudo_labels.add(source, assembly, workdir)
        assembly, suite = _assemble(config, source)
    make_workdir(workdir)
    agreement.check_workdir_is_shared(workdir, config.hosts.wait_minutes)
    programs.fetch()
    clock = Clock(workdir, config.hosts, write=jax.process_index() == 0)
    with contextlib.ExitStack() as stack:
        stop = stack.enter_context(StopRequest())
        if jax.process_index() == 0:
            stack.enter_context(_lock(workdir))
        stack.enter_context(clock)
        stack.enter_context(jax.set_mesh(mesh))
        run = _make_run(
            assembly, source, suite, mesh, workdir, clock, stop, programs, Callbacks(callbacks)
        )
        yield _begin(run, stack)


def _check(config: Config, workdir: epath.Path) -> tuple[Assembly, Source, evaluation.Suite]:
    """The parts of a run that need no device, checked as far as that is possible without one."""
    make_deterministic(config)
    source = sources.open_train(config.data)
    assembly, suite = _assemble(config, source)
    preflight.check_run(assembly, source, suite, workdir)
    agreement.check_run_agrees(assembly, source, suite)
    return assembly, source, suite


def _assemble(config: Config, source: Source) -> tuple[Assembly, evaluation.Suite]:
    assembly = assembly_for(config, source)
    return assembly, evaluation.make(config.eval.evaluators, subject_of(assembly, source))


def _lock(workdir: epath.Path) -> Lock:
    """Keeps other runs out of the workdir; a run that loses it ends in all processes."""
    return Lock(workdir, on_lost=lambda message: processes.abort_all(message, UserError.exit_code))


def _make_run(
    assembly: Assembly,
    source: Source,
    suite: evaluation.Suite,
    mesh: jax.sharding.Mesh,
    workdir: epath.Path,
    clock: Clock,
    stop: StopRequest,
    programs: Programs,
    callbacks: Callbacks,
) -> Run:
    config = assembly.config
    like = assembly.abstract_state(mesh)
    announce.announce(assembly, source, suite, like.params, workdir)
    description = describe_run(assembly, source)
    checkpoints = saving.Checkpoints(
        workdir,
        config.checkpoint,
        config.hosts.wait_minutes,
        # A resumed run does not log the metrics before its checkpoint again.
        before_commit=lambda: run.writers.sync(),
    )
    tier = _make_tier(config, workdir, like) if config.checkpoint.local else None
    begin = Start(assembly, checkpoints, tier, description, like)
    checks = DeviceChecks(assembly, source, like, mesh)
    train_step = StepPrograms(
        assembly.train_step, like, seed_key(config), mesh, config.audit.checker_every
    )
    skipped_data = SkippedData(workdir)
    run = Run(
        assembly=assembly,
        source=source,
        suite=suite,
        mesh=mesh,
        workdir=workdir,
        clock=clock,
        stop=stop,
        programs=programs,
        callbacks=callbacks,
        like=like,
        description=description,
        checkpoints=checkpoints,
        tier=tier,
        begin=begin,
        skipped_data=skipped_data,
        checks=checks,
        train_step=train_step,
    )
    return run


def _make_tier(config: Config, workdir: epath.Path, like: TrainState) -> "LocalTier":
    from vit_jax.checkpoints.tiers import LocalTier

    return LocalTier(config.checkpoint.local, workdir, like.parts(), config.hosts.wait_minutes)


def _begin(run: Run, stack: contextlib.ExitStack) -> Progress:
    """Finds or makes the state; from then on files are written.

    Args:
      stack: closes the parts of the run, the last one first.
    """
    actions = make_actions(run)
    state = run.begin()
    step = int(state.step)
    recipe = announce.keep_recipe(run.assembly, run.source, run.suite, run.workdir)
    run.recipe = recipe
    writers = make_writers(run.workdir, run.config, step)
    run.writers = Writers(writers, run.callbacks)
    stack.callback(run.programs.close)
    if run.tier:
        stack.callback(run.tier.close)
    stack.callback(run.clock.write)
    stack.callback(run.writers.close)
    # A checkpoint that is being written waits for the writers.
    stack.callback(run.checkpoints.close)
    stack.callback(run.train_step.close)
    for action in actions:
        stack.callback(action.close)
    progress = Progress(run, actions, state, step)
    progress.take_up(run.begin.saved)
    return progress
