"""Trains a model from a config: batches, the step, and actions around it (`actions/`). One step is in `step.py`."""

from collections.abc import Sequence

import jax
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import logs
from vit_jax.data import loader
from vit_jax.devices import meshes, processes
from vit_jax.training.actions.contract import Progress
from vit_jax.training.setup import open_run
from vit_jax.training.upkeep import announce
from vit_jax.training.upkeep.callbacks import Callback
from vit_jax.training.upkeep.preemption import Interrupted
from vit_jax.training.verdicts import EndRun, Restore

# A hint for users on the time that it takes.
_COMPILING = "once for a model, a batch and a kind of devices; later starts take it from config.compilation_cache"


def train(
    config: ConfigDict, workdir: epath.PathLike, *, callbacks: Sequence[Callback] = ()
) -> dict[str, float]:
    """Trains, or continues training, in `workdir`, from any thread. It logs as the command does,
    unless the surrounding program or notebook has configured logging.

    The order matters:
    1. options of the model that the config leaves open are taken from the checkpoint to start from;
       errors in the config or the data are reported before devices are used or files written;
    2. the parts of the run are put together; the state is described, not made;
    3. an earlier run in `workdir` is resumed: its step is all that is needed to continue with the same
       examples and the same randomness. The state of a new run is made in its shards, from `init_from`
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
      CheckpointError, NonFiniteError, BadImage: the run cannot continue; its checkpoints stay.
    """
    with open_run(config, workdir, callbacks) as progress:
        fit(progress)
        run = progress.run
        result = progress.results | {
            "step": progress.step,
            "seconds": run.clock.training_seconds,
            "goodput": run.clock.shares(),
        }
        result |= progress.conclusions
        announce.announce_end(run.workdir, result, run.clock)
        return result


def fit(progress: Progress) -> None:
    """Trains to the end of the run. Where an action asks for that, it goes back to the last checkpoint and on."""
    while True:
        try:
            _finish(progress)
            return
        except Restore as problem:
            _go_back(progress, problem)


def _finish(progress: Progress) -> None:
    """Trains from where the run is to its end.

    Raises:
      Interrupted: a signal came, and the run is saved.
    """
    for action in progress.actions:
        action.start(progress)
    is_stopped = not progress.ended and _run_steps(progress)
    progress.batch = {}  # and its memory
    if is_stopped and not progress.is_complete:
        _interrupt(progress)
    progress.save_now()
    for action in progress.actions:
        action.end(progress)


def _run_steps(progress: Progress) -> bool:
    """Runs the steps that remain, or fewer; returns whether a signal stopped them."""
    run = progress.run
    batches = loader.train_batches(
        run.source,
        run.config,
        meshes.batch_sharding(run.mesh),
        start_step=progress.step,
        stop_step=run.total_steps,
        skipped=run.skipped_data.ranges,
    )
    with batches, run.stop.calling(batches.end):
        progress.batches = batches
        for batch in run.clock.each(batches, "input"):
            progress.batch = batch
            _run_step(progress)
            if not progress.continues:
                return progress.is_stopped
    return run.stop.requested  # while it waited for a batch


def _run_step(progress: Progress) -> None:
    """One step, and the actions around it. Only actions wait for the devices."""
    run = progress.run
    if not run.train_step.is_compiled(progress.batch):
        _compile(progress)
    for action in progress.actions:
        action.before_step(progress)
    # A transfer between host and devices would stall every step. The host waits where the queue of steps is full.
    with jax.transfer_guard("disallow"), run.clock.waiting():
        new = run.train_step(progress.step + 1, progress.state, progress.batch)
    progress.state, progress.metrics = new
    progress.step += 1
    for action in progress.actions:
        try:
            action.after_step(progress)
        except EndRun as end:  # All later actions have this step too.
            progress.ended = progress.ended or str(end)


def _compile(progress: Progress) -> None:
    """Has the step compiled for such a batch by all processes before any of them runs it: the first collective
    of one would not wait long for another that is still compiling.
    """
    run = progress.run
    batch = progress.batch
    with run.clock.during("compile"):
        with logs.with_elapsed_time("compiling the training step", about=_COMPILING):
            if not run.train_step.is_begun:
                batches = run.assembly.abstract_batches(run.mesh)
                run.train_step.compile(progress.state, batches, batch)
                for action in progress.actions:
                    action.compile(progress, batches)
            run.train_step.wait(batch)
        name = f"compiled for step {progress.step + 1}"
        processes.barrier(name, run.config.hosts.wait_minutes)
    run.programs.keep()
    run.clock.training()


def _interrupt(progress: Progress) -> None:
    """Saves and says so. Raises `Interrupted`."""
    run = progress.run
    signal = run.stop.name
    stopped = f"stopped by {signal} after step {progress.step} of {run.total_steps}; "
    try:
        progress.save_now()
    except Restore as bad:  # Found, or undone, by the next start.
        raise Interrupted(f"{stopped}not saved: {bad} Start again to continue") from bad
    raise Interrupted(f"{stopped}saved, start again to continue")


def _go_back(progress: Progress, problem: Restore) -> None:
    """Continues from the last checkpoint, or from the beginning if there is none."""
    run = progress.run
    with run.clock.during("start"):
        progress.state = run.begin()
        progress.step = int(progress.state.step)
        progress.take_up(run.begin.saved)
    progress.went_back_for = problem
    run.writers.rewind(progress.step)
