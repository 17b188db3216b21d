"""What is checked of a run when its parts are put together, before devices are used and files written; the same for
`train` and for `train --dry_run`. What can be checked of the config alone is in `assembly.resolve`.
"""

import os

from vit_jax import evaluation
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import Config
from vit_jax.data.record import Source
from vit_jax.devices import local, processes
from vit_jax.evaluation import Suite
from vit_jax.models import registry
from vit_jax.objectives.networks import FixedTeacher
from vit_jax.recipes import user_files
from vit_jax.training.assembly import Assembly
from vit_jax.training.guards import check_classes, check_teacher

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
        assembly.to_steps(getattr(getattr(config, section) if section else config, field))
    has_run = workdir is not None and reading.newest_description(workdir) is not None
    if not has_run:
        _check_profile(config, assembly.total_steps)
        _check_effects(assembly)
        if config.init_from:
            from vit_jax.training.initial_weights import check_fits

            check_fits(assembly)
    if suite is not None:
        if user_files.outside([type(evaluator) for _, evaluator in suite.evaluators]):
            from vit_jax.evaluation import rehearsal

            rehearsal.rehearse(suite.evaluators)
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


def _check_effects(assembly: Assembly) -> None:
    """Raises `ConfigError` for settings that would do something else than they seem to."""
    config = assembly.config
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
    names, target = suite.metrics(), config.eval.target
    if names is not None:
        metric, _ = evaluation.best_metric(config.eval.best, dict.fromkeys(names, 0.0))
        if target is not None and evaluation.is_share(metric) and not 0 < target <= 1:
            raise ConfigError(
                f"config.eval.target = {target:g}: {metric} is a share, from 0 to 1; set e.g. 0.6 for 60 %"
            )


def _check_pseudo_teacher(assembly: Assembly, source: Source | None) -> None:
    from vit_jax.interchange import formats

    path = assembly.config.pseudo.teacher
    try:
        teacher = formats.read_checkpoint(path)
    except CheckpointError as error:
        raise ConfigError(f"config.pseudo.teacher = {path!r} cannot be read: {error}") from error
    check_teacher(path, teacher.model_config, assembly.model_config)
    if source is not None and teacher.classes is not None:
        named = FixedTeacher(path, teacher.model_config, {}, tuple(teacher.classes))
        check_classes(named, source.classes)


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
