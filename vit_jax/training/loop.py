"""Trains a model from a config: the loop and the order of what happens around it. One step is in `step.py`."""

import json
import os
import pathlib
import time

import jax
from absl import logging
from clu import parameter_overview
from ml_collections import ConfigDict

from vit_jax import checkpoint, parallel, patterns
from vit_jax.data import loader, sources
from vit_jax.errors import UserError
from vit_jax.evaluation import accuracy
from vit_jax.interchange import loading
from vit_jax.schema import ConfigError
from vit_jax.training import state as states
from vit_jax.training.assembly import Assembly, assemble, check
from vit_jax.training.progress import Meter, Profiler, StopRequest, make_writers
from vit_jax.training.step import compile_train_step

# Fields of the config that a resumed run may change: they do not change what is learnt.
MAY_CHANGE = (
    r"(log|checkpoint|eval|mesh)\..*",
    r"data\.(eval_.*|threads|processes|prefetch|on_bad_image|max_bad_images)",
    r"model\.(remat|unroll)",
    r"nonfinite|max_skips|compilation_cache",
)


class Interrupted(UserError):
    """A signal asked the run to stop; its state is saved. Start it again to go on."""

    exit_code = 42


def train(config: ConfigDict, workdir: str | os.PathLike) -> dict[str, float]:
    """Trains, or goes on training, in `workdir`.

    The order matters:
    1. options of the model that the config leaves open are those of the checkpoint to start from;
       what is wrong with the config or the data is said before devices are used or files written;
    2. the parts of the run are put together, the state is described, not made;
    3. an earlier run in `workdir` is resumed: its step is all that is needed to go on with the same examples and the same
       randomness; otherwise the state is made in its shards, from `init_from` if that is given;
    4. steps are dispatched ahead of the devices; the host waits for them only where it logs, evaluates or saves.

    Returns:
      The last evaluation's metrics and `step`, `seconds` (of training, all restarts together).

    Raises:
      ConfigError: see 1.
      Interrupted: SIGTERM or SIGINT came; the state was saved.
      CheckpointError, NonFiniteError, BadImage: the run cannot go on; what was saved stays.
    """
    config = loading.take_over(config, workdir)
    check(config)
    workdir = pathlib.Path(workdir).expanduser().absolute()
    train_source = sources.open_train(config.data)
    eval_source = sources.open_eval(config.data)
    assembly = assemble(config, num_classes=len(train_source.classes), examples_per_epoch=len(train_source))
    if train_source.classes != eval_source.classes:
        raise ConfigError(f"config.data: the classes of {config.data.train_split!r} and {config.data.eval_split!r} differ")
    use_compilation_cache(config.compilation_cache)
    mesh = parallel.make_mesh(config.mesh)
    check_batch(config, mesh)
    _make_workdir(workdir)

    with StopRequest() as stop, jax.set_mesh(mesh):
        checkpoints = checkpoint.Checkpoints(workdir, config.checkpoint)
        description = checkpoint.describe(config, assembly.model_config, train_source.classes, len(train_source))
        like = assembly.abstract_state(mesh)
        _tell(assembly, like, mesh)
        state, seconds = _start(assembly, checkpoints, description, like)
        writers = make_writers(workdir, config.log)
        meter = Meter(assembly, train_source, writers, seconds, start_step=int(state.step))
        try:
            return _loop(assembly, mesh, state, train_source, eval_source, checkpoints, description, meter, stop, workdir)
        finally:
            meter.close()
            writers.close()
            checkpoints.close()


def _loop(assembly: Assembly, mesh, state, train_source, eval_source, checkpoints, description, meter, stop, workdir):
    config, total = assembly.config, assembly.total_steps
    step_fn = compile_train_step(assembly.train_step, states.shardings_of(state), mesh)
    eval_step = accuracy.make_eval_step(assembly.definition, assembly.model_config, config, mesh)
    batch_sharding = parallel.batch_sharding(mesh)
    log_every, eval_every, save_every = (assembly.to_steps(s.every) for s in (config.log, config.eval, config.checkpoint))
    start = int(state.step)
    results, saved_at = {}, time.monotonic()

    def save(step: int) -> None:
        meter.check_health(state)
        checkpoints.save(step, state, description | {"seconds": meter.seconds})

    def evaluate(step: int) -> None:
        with loader.eval_batches(eval_source, config, batch_sharding) as batches:
            params = state.params if state.ema is None else state.ema
            results.update(accuracy.evaluate(eval_step, params, batches, mesh))
        meter.write(step, {f"eval/{name}": value for name, value in results.items()})

    profiler = Profiler(config.log.profile, workdir / "profile")
    with loader.train_batches(train_source, config, batch_sharding, start_step=start, stop_step=total) as batches:
        for step, batch in enumerate(batches, start + 1):
            profiler.before(step)
            # Whatever else is moved between host and devices in here would be a wait in every step.
            with jax.transfer_guard("disallow"):
                state, metrics = step_fn(state, batch)
            meter.add(step, metrics)
            profiler.after(step, metrics)
            if step == start + 1 or _due(step, log_every, total):
                meter.log(step, state, batches)
            if stop.requested:
                break
            with meter.paused():
                if _due(step, eval_every, total):
                    evaluate(step)
                minutes = (time.monotonic() - saved_at) / 60
                if _due(step, save_every, total) or 0 < config.checkpoint.every_minutes <= minutes:
                    save(step)
                    saved_at = time.monotonic()
    step = int(state.step)
    if stop.requested and step < total:
        save(step)
        checkpoints.wait()
        raise Interrupted(f"stopped by {stop.name} after step {step} of {total}; saved, start again to go on")
    if not results:  # Resumed when all was done.
        evaluate(step)
        save(step)
    checkpoints.wait()
    result = results | {"step": step, "seconds": meter.seconds}
    if jax.process_index() == 0:
        (workdir / "result.json").write_text(json.dumps(result) + "\n")
    return result


def _due(step: int, every: int, total: int) -> bool:
    """Whether something done `every` steps (0: only at the end) is done now; everything is done at the end."""
    return step == total or (every > 0 and step % every == 0)


def _start(assembly: Assembly, checkpoints: checkpoint.Checkpoints, description: dict, like) -> tuple:
    """The state to go on from, and the seconds it took to get there."""
    seconds = 0.0

    def same_run(saved: dict) -> None:
        nonlocal seconds
        seconds = saved["seconds"]
        changed = changed_fields(saved, description)
        if changed:
            told = f"the config differs from the one this run was started with, in {'; '.join(changed)}"
            if assembly.config.checkpoint.on_config_change == "error":
                raise ConfigError(f"{told}. Use another --workdir, or --config.checkpoint.on_config_change=allow")
            logging.warning("%s; going on, as config.checkpoint.on_config_change says", told)

    restored = checkpoints.restore_latest(like, same_run)
    if restored:
        logging.info("resumed at step %d of %d", restored[0], assembly.total_steps)
        return restored[1], seconds
    state = states.create(assembly.init, assembly.config.seed, like)
    if assembly.config.init_from:
        state = start_from(assembly, state)
    return state, 0.0


def start_from(assembly: Assembly, state: states.TrainState) -> states.TrainState:
    """`state` with the parameters of `config.init_from` in place of the new ones, except those to reset."""
    config = assembly.config
    params = loading.load_params(
        config.init_from, state.params, assembly.model_config, reset=config.init_reset, resize=config.init_resize
    )
    ema = None if state.ema is None else jax.tree.map(lambda p: p.copy(), params)
    return state.replace(params=params, ema=ema)


def changed_fields(saved: dict, description: dict) -> list[str]:
    """What of two descriptions differs and would change the result, as 'field: old -> new'."""
    told = []
    for key in ("config", "classes", "training_examples"):
        old, new = (dict(_flat(json.loads(json.dumps(d[key])), key)) for d in (saved, description))
        names = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
        may = set(patterns.matching([rf"config\.({p})" for p in MAY_CHANGE], names))
        told += [f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in names if n not in may]
    return told


def _flat(tree, prefix: str):
    if isinstance(tree, dict):
        for name, value in tree.items():
            yield from _flat(value, f"{prefix}.{name}")
    else:
        yield prefix, tree


def check_batch(config: ConfigDict, mesh: jax.sharding.Mesh) -> None:
    """Raises `ConfigError` unless batches can be cut evenly over the mesh."""
    replicas = mesh.shape["data"] * mesh.shape["fsdp"]
    part = config.batch_size // config.accumulate
    for name, size in (("batch_size / accumulate", part), ("eval.batch_size", config.eval.batch_size)):
        if size % replicas:
            raise ConfigError(
                f"config.{name} = {size} cannot be spread over {replicas} devices (data x fsdp); choose a multiple of {replicas}"
            )


def use_compilation_cache(directory: str) -> None:
    """Keeps compiled programs between runs, readable by their owner only: who can write them can run code in the job."""
    if directory:
        path = pathlib.Path(directory).expanduser()
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(path))


def _make_workdir(workdir: pathlib.Path) -> None:
    """Makes the folder and proves that it can be written to, before any work is done."""
    probe = workdir / ".writable"
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"\0" * 4096)
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write to --workdir={workdir}: {error.strerror}") from error


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
