"""What `vit_jax evaluate` may change of a run's config: where the data is and how it is read, how the model is
computed, and for images and patches of which sizes; what `predict`, `inspect`, `serve` and `export` may: these sizes,
and how images are prepared, as `convert` may too. Anything else would have no effect, and is refused.
"""

import dataclasses
import os
from collections.abc import Iterable, Mapping
from typing import Any

from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import places, schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.settings import change, named_entries
from vit_jax.checkpoints import descriptions
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import Config, config_class, default_config
from vit_jax.data import crops, sources
from vit_jax.data.sources.prepared import DESCRIPTION
from vit_jax.evaluation import leakage
from vit_jax.interchange import loading
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.resized import config_at

_SECTIONS = ("data", "eval")
_OF_TRAINING = {
    *(f"data.{name}" for name in crops.TRAINING), "data.repeats",
    "eval.every", "eval.best", "eval.patience", "eval.target",
}  # fmt: skip
_LOSS = "objective.loss"  # softmax or sigmoid, which make probabilities of logits
_ANSWERS = (_LOSS, "eval.thresholds")
_FIELDS = ("batch_size", "model.dtype", "init_resize", _LOSS)
_OF_IMAGES = (
    "mean", "std", "eval_crop", "eval_resize", "interpolation", "max_pixels", "max_value", "native_tokens",
)  # fmt: skip
_SIZES = "data.image_size", "model.patch"


def load_to_evaluate(
    path: epath.PathLike,
    changes: Iterable[tuple[str, str]],
    model_options: Mapping[str, Any] | None = None,
    *,
    needs_data: bool = True,
) -> tuple[TrainedModel, Config]:
    """A trained model and the config to evaluate it with.

    Args:
      path: see `loading.load_run`.
      changes: of the run's config, see `settings.change`.
      model_options: see `loading.load_run`.
      needs_data: whether it is evaluated on the data that the config names.

    Raises:
      ConfigError: no data is named, where the checkpoint is not of ours; or a field is unknown or
        has no effect on an evaluation; raised before the model is read.
      CheckpointError: see `loading.load_run`.
    """
    config, options, fit = config_to_evaluate(path, changes, model_options, needs_data=needs_data)
    run = loading.load_run(path, model_options=model_options, **options)
    return at_sizes(run, config, fit), config


def at_sizes(run: TrainedModel, config: Config, fit: Mapping[str, Any]) -> TrainedModel:
    """The model for images of the size of `config`; `fit` is that of `config_to_evaluate`."""
    if not fit:
        return run
    if run.objective_modules:
        raise ConfigError(
            "the model answers by what its objective owns, which is for images and patches of the run's sizes: leave "
            "config.data.image_size and config.model.patch out"
        )
    return loading.resized(run, config.data.image_size, **fit)


def config_to_evaluate(
    path: epath.PathLike,
    changes: Iterable[tuple[str, str]],
    model_options: Mapping[str, Any] | None = None,
    *,
    needs_data: bool = True,
) -> tuple[Config, dict[str, Any], dict[str, Any]]:
    """The config to evaluate a trained model with; the options of how it is computed that `changes` set; and those of
    `loading.resized` if images or patches have other sizes than the model's, else none. See `load_to_evaluate`.
    """
    changes = list(changes)
    checkpoint = loading.read_model(path, model_options)
    description = loading.describe_checkpoint(checkpoint)
    model_config = descriptions.stored_model_config(description)
    config = schema.fill(default_config(), description["config"])
    is_run = checkpoint.run is not None and description["training_examples"] > 0
    trained_on = config.to_dict() if is_run else {}
    if not is_run:
        config.data.name = ""
    change(config, Config, changes)
    if needs_data and not config.data.name:
        raise ConfigError(
            f"{path} is not a run of yours and names no data: set what to evaluate on, --config.data.name=imagenet2012 "
            "or --config.data.name=folder --config.data.path=FOLDER"
        )
    fitted = () if model_config.fixed_size_reason else ("patch",)
    compute = schema.with_role(type(model_config), "compute")
    check_changes(changes, (*compute, *fitted))
    typed = schema.typed(config_class(config), config)
    typed, fit = _fit(typed, model_config, dict(changes))
    if typed.data.channels != model_config.channels:
        raise ConfigError(
            f"config.data.channels is {typed.data.channels}, but the model takes images of {model_config.channels} "
            "channels; images of a folder are converted, so leave the field as it is"
        )
    changed = [name for name, _ in changes]
    if "data.path" in changed:
        sources.check_path(typed.data)
    if {"data.image_feature", "data.mask_feature", "data.mask_table"} & set(changed):
        sources.check_features(typed.data)
    typed = leakage.judge_whole(typed, trained_on, description.get("training_data", ""), changed)
    of_model = {name.partition(".")[2] for name, _ in changes if name.startswith("model.")}
    options = {n: config.model[n] for n in of_model - {*fitted} if config.model[n] is not None}
    return typed, options, fit


def _fit(
    config: Config, model: ClassifierConfig, changes: Mapping[str, str]
) -> tuple[Config, dict[str, Any]]:
    """`config` and the options of `loading.resized`, see `config_to_evaluate`."""
    size, old = config.data.image_size, model.image_size
    patch = config.model.patch if "model.patch" in changes else None
    entries = config.eval.evaluators
    if patch and "eval.evaluators" not in changes:  # not each of the run's patch sizes
        named = named_entries("eval.evaluators", entries)
        entries = tuple(entry for entry in named if entry[0] != "patch_sizes")
        config = dataclasses.replace(
            config, eval=dataclasses.replace(config.eval, evaluators=entries)
        )
    patch = 0 if patch in (None, getattr(model, "patch", None)) else patch
    if size == old and not patch:
        return config, {}
    config_at(model, size, patch)
    data = dataclasses.replace(config.data, native_patch=0)  # which a native run has in its config
    if size != old and "data.eval_resize" not in changes:  # the same share of an image
        share = min(sizes.height_width(size)) / min(sizes.height_width(old))
        data = dataclasses.replace(data, eval_resize=round(share * data.eval_resize))
    crops.check_crops(data)
    # As steps of several sizes do; else as fine-tuning does.
    resize = "bilinear" if patch or data.patch_sizes else "scipy"
    resize = config.init_resize if "init_resize" in changes else resize
    return dataclasses.replace(config, data=data), {"patch": patch, "resize": resize}


def check_changes(
    changes: Iterable[tuple[str, str]], compute: tuple[str, ...] | None = None
) -> None:
    """Raises `ConfigError` for a field that has no effect on an evaluation.

    Args:
      changes: see `load_to_evaluate`.
      compute: options of the model that say how it is computed; `None` if the model is not known yet,
        and any option may be one.
    """
    usable = (*_FIELDS, *(f"model.{name}" for name in compute or ()))
    for name, _ in changes:
        in_section = name.split(".")[0] in _SECTIONS and name not in _OF_TRAINING
        may_compute = compute is None and name.startswith("model.")
        if not in_section and not may_compute and name not in usable:
            raise ConfigError(
                f"evaluate cannot use config.{name}. Besides data and eval it takes {', '.join(usable)}; "
                "what the model is, the checkpoint says"
            )


def fields_of_data(data: epath.PathLike) -> dict[str, str]:
    """The fields of the config that name a data set to evaluate on: a folder, a prepared set, or a name; {} of ''.

    Raises:
      ConfigError: it is a path where nothing is.
    """
    if not data:
        return {}
    place = places.locate(data, "data") if places.exists(os.fspath(data)) else None
    if place is None:
        if os.path.isabs(data) or os.fspath(data).startswith((".", "~")):
            raise ConfigError(f"{data} does not exist{places.nearest_existing(data)}")
        return {"data.name": os.fspath(data), "data.path": ""}
    name = "prepared" if (place / DESCRIPTION).exists() else "folder"
    return {"data.name": name, "data.path": str(place)}


def load_for_images(
    path: epath.PathLike,
    settings: Iterable[tuple[str, str]],
    command: str,
    model_options: Mapping[str, Any] | None = None,
) -> TrainedModel:
    """A trained model for images that the user brings; its config says how they are prepared, and which sizes images
    and patches have.

    Args:
      path, model_options: see `loading.load_run`.
      settings: see `settings.change`; beside the fields of `of_images` also `data.image_size`, `model.patch`,
        `objective.loss`, which decides between softmax and sigmoid, and `eval.thresholds`.
      command: for messages.

    Raises:
      ConfigError: see `of_images`; the model has one size of images or patches.
      CheckpointError: see `loading.load_run`.
    """
    run = loading.load_run(path, model_options=model_options)
    sized = {name: value for name, value in settings if name in _SIZES}
    answers = [(name, value) for name, value in settings if name in _ANSWERS]
    others = [(name, value) for name, value in settings if name not in (*_SIZES, *_ANSWERS)]
    prepared = of_images(run.config, others, command, (*_SIZES, *_ANSWERS))
    change(run.config, Config, answers)
    if sized:
        config = run.config.copy_and_resolve_references()
        change(config, Config, sized.items())
        typed, fit = _fit(schema.typed(config_class(config), config), run.model_config, sized)
        run = at_sizes(run, typed, fit)
    run.config.data.update(prepared)
    return run


def of_images(
    config: ConfigDict, settings: Iterable[tuple[str, str]], command: str, more: Iterable[str] = ()
) -> dict[str, Any]:
    """The fields of `config.data` that settings change, of those in `_OF_IMAGES`.

    Args:
      config: of the run, not changed.
      settings: see `settings.change`.
      command, more: for messages; more are the fields that it also takes.

    Raises:
      ConfigError: there is no such field, it is not one of these, or the value is invalid.
    """
    settings, known = list(settings), [f"data.{name}" for name in _OF_IMAGES]
    changed = config.copy_and_resolve_references()
    change(changed, Config, settings)
    for name, _ in settings:
        if name not in known:
            usable = ", ".join((*known, *more))
            raise ConfigError(f"{command} cannot use config.{name}, only {usable}")
    data = schema.typed(config_class(changed), changed).data
    return {name: getattr(data, name) for name in _OF_IMAGES if f"data.{name}" in dict(settings)}
