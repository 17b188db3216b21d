"""How each section of a run's config is filled in and checked, as far as that needs neither data nor devices.

Checks that need the data are in `assembly.outline`, and checks that need the machine in `preflight`.
"""

import dataclasses
from collections.abc import Callable, Iterator

from etils import epath
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.config import Config
from vit_jax.data import crops, sources, views
from vit_jax.data.augmentation import augment, pipeline
from vit_jax.objectives.networks import model_config_of
from vit_jax.training import guards

# Functions for settings that few runs have: imported by a run that has them.
_RARE = LazyTable(
    {
        "from_checkpoint": "vit_jax.interchange.resolving:resolve_from_checkpoint",
        "permute": "vit_jax.data.augmentation.permute:check_patches",
        "native_sizes": "vit_jax.data.native_sizes:for_training",
        "curve": "vit_jax.training.upkeep.curves:absolute_name",
    }
)
Workdir = epath.PathLike | None


def fill_from_checkpoint(config: ConfigDict, workdir: Workdir) -> ConfigDict:
    """Fills in the fields that a config leaves to the checkpoint that it starts from: those of its model, and how
    images are prepared for it.
    """
    has_model = config.model.name
    has_preprocessing = config.data.mean and config.data.std and config.data.interpolation
    if has_model and has_preprocessing and not config.init_from:
        return config
    return _RARE["from_checkpoint"](config, workdir)


def _resolve_data(config: Config, workdir: Workdir) -> Config:
    data = augment.with_channels(config.data)
    if data.examine and workdir:
        data = guards.data_as_begun(data, workdir)
    pipeline.check_augmentation(config.augment, data.channels)
    crops.check_crops(data)
    sources.check_path(data)
    sources.check_features(data)
    if data.permute != "none":
        _RARE["permute"](data)
    config = dataclasses.replace(config, data=sources.with_absolute_paths(data))
    views.variants(config)
    return config


def _resolve_objective(config: Config, workdir: Workdir) -> Config:
    if config.objective.name == "sum" and workdir:
        options = guards.sum_as_begun(config.objective, workdir)
        config = dataclasses.replace(config, objective=options)
    objective, options = objectives.find_objective(config.objective)
    model_config = model_config_of(config, config.model.num_classes or 1)
    if config.data.native_tokens:
        config = _RARE["native_sizes"](config, objective.takes_native, model_config)
    return objective.resolve(config, options)


def _resolve_teachers(config: Config, workdir: Workdir) -> Config:
    for field, teacher in _teachers(config):
        if workdir and teacher and guards.is_of_run(teacher, workdir):
            raise ConfigError(
                f"config.{field} = {teacher!r} is the run itself: set another --workdir, or another teacher"
            )
    return config


def _teachers(config: Config) -> Iterator[tuple[str, str]]:
    """Each field that may name a checkpoint to learn from, and its value."""
    yield "objective.teacher", getattr(config.objective, "teacher", "")
    for teacher in getattr(config.objective, "teachers", None) or ():
        yield "objective.teachers", teacher
    yield "pseudo.teacher", config.pseudo.teacher


def _resolve_lora(config: Config, workdir: Workdir) -> Config:
    rank = config.lora.lora_rank
    if rank and not config.init_from:
        raise ConfigError(
            f"config.lora.lora_rank is {rank}, which adapts a checkpoint: set --config.init_from=…"
        )
    return config


def _resolve_batch(config: Config, workdir: Workdir) -> Config:
    if config.data.repeats > config.batch_size:
        raise ConfigError(
            f"config.data.repeats = {config.data.repeats} must be at most config.batch_size = {config.batch_size}"
        )
    if config.batch_size % config.accumulate:
        raise ConfigError(
            f"config.batch_size {config.batch_size} is not divisible by config.accumulate = {config.accumulate}"
        )
    return config


def _resolve_cache(config: Config, workdir: Workdir) -> Config:
    if config.compilation_cache != "auto":
        places.absolute(config.compilation_cache, "config.compilation_cache")
    return config


def _resolve_reference(config: Config, workdir: Workdir) -> Config:
    if not config.reference.curve:
        return config
    curve = _RARE["curve"](config.reference.curve)
    return dataclasses.replace(config, reference=dataclasses.replace(config.reference, curve=curve))


# In this order: the objective reads the data's settings, and the batch is checked as both have left it.
RESOLVERS: tuple[Callable[[Config, Workdir], Config], ...] = (
    _resolve_data,
    _resolve_objective,
    _resolve_teachers,
    _resolve_lora,
    _resolve_batch,
    _resolve_cache,
    _resolve_reference,
)
