"""The config of a run that starts from a checkpoint: what it leaves open is filled in from there."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax import objectives
from vit_jax.base import patterns, schema, sizes
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import CHECKPOINT
from vit_jax.data.augmentation import augment
from vit_jax.models import classifier, naming, registry

if TYPE_CHECKING:
    from vit_jax.interchange.formats import LoadedCheckpoint

# What may be left to the checkpoint, and its value where that, or an earlier version of this code,
# does not say it.
DEFAULT_IF_MISSING = {"mean": (), "std": (), "interpolation": "bilinear"}


def resolve_from_checkpoint(
    config: ConfigDict, workdir: epath.PathLike | None = None
) -> ConfigDict:
    """A run's config, its open model options filled in from the checkpoint that it starts from.

    These are the options of its structure and conventions (see `schema.option`); with
    `config.model.name=''` also name and sizes; and `config.data.mean`, `std` and `interpolation` where
    they are empty. A run that was begun in `workdir`, if that is given, keeps what it took then.

    Raises:
      CheckpointError: the checkpoint to start from cannot be read.
      ConfigError: the recipe needs a checkpoint, or name, mean, std or interpolation are left to one,
        and there is none; or it does not say mean and std.
    """
    if config.init_from == CHECKPOINT:
        raise ConfigError(
            "this recipe starts from a checkpoint: set --config.init_from=CHECKPOINT, a run of "
            "yours, a file of any format in docs/checkpoints.md, or hf://OWNER/NAME"
        )
    if not config.init_from:
        if not (config.model.name and all(config.data[name] for name in DEFAULT_IF_MISSING)):
            raise ConfigError(
                "config.model.name, data.mean, std or interpolation is empty, which leaves it to the checkpoint "
                "to start from: set --config.init_from=CHECKPOINT"
            )
        return config
    saved = reading.newest_description(workdir) if workdir else None
    saved = saved and saved["config"]
    hints = schema.given_options(config.model) | {"image_size": config.data.image_size}
    source = None
    if not saved:
        from vit_jax.interchange import formats

        try:
            source = formats.read_checkpoint(config.init_from, hints=hints)
        except CheckpointError as error:
            raise CheckpointError(f"config.init_from: {error}") from error
    config = config.copy_and_resolve_references()
    _resolve_model(config, saved, source)
    prepared = saved["data"] if saved else source.preprocessing and vars(source.preprocessing)
    for name, default in DEFAULT_IF_MISSING.items():
        if not config.data[name]:
            known = (prepared or {}).get(name, default)
            config.data[name] = tuple(known) if isinstance(known, list) else known
    augment.check_normalization(config.data, config.init_from)
    return config


def _resolve_model(
    config: ConfigDict, saved: Mapping[str, Any] | None, source: "LoadedCheckpoint | None"
) -> None:
    """Fills in `config.model`: from the config of the run that is resumed, or from the checkpoint."""
    model, whole = config.model, not config.model.name
    if whole:
        model.name = (
            saved["model"]["name"]
            if saved
            else naming.nearest_name(source.model_config, source.called)
        )
    family = registry.family_named(model.name)
    options = dict(saved["model"]) if saved else dict(vars(source.model_config))
    if source:
        options |= source.model_config.options_for_image_size(sizes.parse(config.data.image_size))
    has_head = objectives.find_objective(config.objective)[0].needs_labels
    reset = config.init_reset if has_head else classifier.besides_heads(config.init_reset)
    # What the weights are used for; the name stands for their sizes, unless it is the checkpoint's.
    roles = ("structure", "convention", "size") if whole else ("structure", "convention")
    for field in schema.options(family.Config):
        name = field.name
        if field.metadata["role"] not in roles or model[name] is not None:
            continue
        # What is re-initialised is as the config says, e.g. a layer before the head, or none.
        is_reset = field.metadata["fitted"] and field.metadata["role"] == "structure"
        if is_reset and patterns.matching(reset, [f"{name}/kernel"]):
            continue
        if options.get(name) is not None:
            model[name] = options[name]
