"""What is checked of a run when its parts are put together, before devices are used and files written; the same for
`train` and for `train --dry_run`. What can be checked of the config alone is in `assembly.resolve`.
"""

import dataclasses
import math
import os

from vit_jax import evaluation
from vit_jax.base import sizes
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import Config
from vit_jax.data import batches
from vit_jax.data.record import Source
from vit_jax.devices import local, processes
from vit_jax.evaluation import Suite
from vit_jax.models import registry
from vit_jax.optim.options import Optim
from vit_jax.recipes import user_files
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import check_classes, check_teacher, check_workdir
from vit_jax.training.upkeep import goals

_DURATIONS = (
    "log.every",
    "log.images",
    "log.histograms",
    "eval.every",
    "checkpoint.every",
    "rollback_skip",
)


def check_run(
    assembly: Assembly,
    source: Source | None,
    suite: Suite | None,
    workdir: os.PathLike | None = None,
    *,
    teachers: tuple[str, ...] = (),
    elsewhere: bool = False,
) -> None:
    """Raises `ConfigError` for a run that would fail later, or have a setting without an effect.

    Args:
      assembly: of the run.
      source, suite: its examples and evaluators, if the data is at hand.
      workdir: where it runs. A run that was begun there may lack what only a new one must have.
      teachers: values of `pseudo.teacher` that name runs still to be trained.
      elsewhere: it trains on other machines, whose memory is not this one's.
    """
    config = assembly.config
    if assembly.total_steps == 0:
        raise ConfigError(
            f"config.duration = {config.duration!r} is no step of training: set at least '1 step'; to evaluate a "
            "checkpoint use 'vit_jax evaluate'"
        )
    for name in _DURATIONS:
        section, _, field = name.rpartition(".")
        duration = getattr(getattr(config, section) if section else config, field)
        assembly.to_steps(duration, name=f"config.{name}")
    if source is not None:
        for teacher in assembly.networks.teachers:
            check_classes(teacher.path, teacher.classes, source.classes)
        if not elsewhere:
            _check_batches(assembly)
    if workdir is not None and not elsewhere:
        check_workdir(workdir)
    has_run = workdir is not None and reading.newest_description(workdir) is not None
    if not has_run:
        if source is not None and not elsewhere:
            _check_first_image(source, config)
        _check_profile(config, assembly.total_steps)
        _check_effects(assembly)
        if config.init_from:
            from vit_jax.training.initial_weights import check_fits

            check_fits(assembly, source.classes if source is not None else ())
    if suite is not None:
        _rehearse(suite)
        _check_best(config, suite)
    if config.pseudo.teacher and config.pseudo.teacher not in teachers:
        _check_pseudo_teacher(assembly, source)
    if not elsewhere:
        _check_memory(assembly)
    if config.reference.curve:
        from vit_jax.training.upkeep import reference

        reference.check_reference(assembly, source, suite)
    elif config.reference.stop_below:
        raise ConfigError(
            f"config.reference.stop_below = {config.reference.stop_below:g} has no effect without a curve: set "
            "--config.reference.curve=NAME"
        )


def _check_profile(config: Config, total_steps: int) -> None:
    if config.log.profile:
        first, last = config.log.profile
        if not first <= last <= total_steps:
            raise ConfigError(
                f"config.log.profile = ({first}, {last}) must be (first, last) step, the first not after the last, of "
                f"the run's {total_steps:,} steps"
            )


def _rehearse(suite: Suite) -> None:
    """Rehearses the evaluators that are not of this package."""
    for prefix, evaluator in suite.evaluators:
        if files := user_files.outside([type(evaluator)]):
            from vit_jax.evaluation import rehearsal

            rehearsal.rehearse(prefix, evaluator, files[0])


def _check_effects(assembly: Assembly) -> None:
    """Raises `ConfigError` for settings that would do something else than they seem to."""
    config = assembly.config
    if assembly.networks.adapters:
        assembly.networks.adapters.check_rank(
            registry.abstract_weights(assembly.model_config)[1].params
        )
    if assembly.to_steps(config.log.every) == 0:
        raise ConfigError(
            f"config.log.every = {config.log.every!r} must be at least one step, for whether the loss is finite is "
            "seen where metrics are logged: set e.g. '50 steps'; '100%' logs the first and the last step alone"
        )
    _check_decay(config.optim)
    assembly.networks.objective.check_effects()
    for name in ("step_minutes", "other_minutes", "wait_minutes"):
        if getattr(config.hosts, name) == 0:
            raise ConfigError(
                f"config.hosts.{name} = 0 must be above 0: set minutes, e.g. 20; 1e6 is practically never"
            )
    for name in ("patience", "target"):
        value = getattr(config.eval, name)
        if value and assembly.to_steps(config.eval.every) == 0:
            raise ConfigError(
                f"config.eval.{name} = {value:g} has no effect with config.eval.every = {config.eval.every!r}, "
                "which evaluates at the end only: set --config.eval.every='1 epochs'"
            )
    if config.eval.patience and not (config.checkpoint.best or config.eval.best):
        raise ConfigError(
            f"config.eval.patience = {config.eval.patience} ends a run some evaluations after its best one, which is "
            "not kept: set --config.checkpoint.best=True, or name the metric with --config.eval.best=METRIC"
        )


def _check_best(config: Config, suite: Suite) -> None:
    order = goals.find_metric_order(config, suite)
    target = config.eval.target
    if target is not None and order and evaluation.is_share(order.metric) and not 0 < target <= 1:
        raise ConfigError(
            f"config.eval.target = {target:g}: {order.metric} is a share, from 0 to 1; set e.g. 0.6 for 60 %"
        )


def _check_pseudo_teacher(assembly: Assembly, source: Source | None) -> None:
    from vit_jax.interchange import formats

    path = assembly.config.pseudo.teacher
    try:
        teacher = formats.read_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(f"config.pseudo.teacher = {path!r} cannot be read: {error}") from error
    check_teacher(path, teacher.model_config, assembly.model_config)
    if source is not None:
        check_classes(path, teacher.classes, source.classes)


def _check_decay(config: Optim) -> None:
    """Raises `ConfigError` for a weight decay that would turn the signs of parameters around in every step."""
    if config.weight_decay_by == "gradient":
        return
    multiplier = max((multiplier for _, multiplier in config.weight_decay_rules), default=0)
    rate = config.lr if config.weight_decay_by == "lr" else 1
    if rate * config.weight_decay * multiplier >= 1:
        raise ConfigError(
            f"config.optim.weight_decay = {config.weight_decay:g} times the learning rate and the largest of "
            f"config.optim.weight_decay_rules is {rate * config.weight_decay * multiplier:.3g}, which must be below 1, "
            "for a step takes this share of a parameter away: set it lower"
        )


def _check_batches(assembly: Assembly) -> None:
    """Raises `ConfigError` if this machine has too little memory for the images of a few batches."""
    config = assembly.config
    labels = assembly.num_classes, assembly.multi_label, assembly.masks
    largest = max(
        sum(x.dtype.itemsize * math.prod(x.shape) for x in spec.values())
        for spec in batches.specs(config, *labels)
    )
    share = max(1, config.eval.batch_size / config.batch_size) / processes.count()
    needed, available, kept = largest * share, local.memory_bytes(), config.data.prefetch
    if needed * kept > available:
        size = sizes.size_text(config.data.image_size)
        raise ConfigError(
            f"config.data.prefetch = {kept} batches of config.batch_size = {config.batch_size:,} "
            f"(config.eval.batch_size = {config.eval.batch_size:,}) images of config.data.image_size = {size} pixels "
            f"take {needed * kept / 2**30:,.0f} GiB, and this machine has {available / 2**30:,.0f} GiB: set one of "
            "these lower"
        )


def _check_first_image(source: Source, config: Config) -> None:
    """Reads and cuts the first image of a run. Raises what its loader would: a decoder is not installed, images have
    other channels.
    """
    # The order of a balanced epoch takes seconds for millions of examples.
    uniform = dataclasses.replace(config.data, sampling="uniform")
    images = batches.TrainBatches(source, dataclasses.replace(config, data=uniform), rows=[0])
    images.fill(images.empty(), 0, slice(1))


def _check_memory(assembly: Assembly) -> None:
    """Raises `ConfigError` if the CPU that would train has too little memory for the parameters and a gradient."""
    if local.platform() != "cpu" or processes.count() > 1:
        return
    count = registry.count_parameters(assembly.model_config)
    needed, available = 2 * 4 * count, local.memory_bytes()
    if needed > available:
        raise ConfigError(
            f"the model has {count:,} parameters (config.model), which with one gradient take {needed / 2**30:,.0f} "
            f"GiB, and this machine's CPU has {available / 2**30:,.0f} GiB: set a smaller model"
        )
