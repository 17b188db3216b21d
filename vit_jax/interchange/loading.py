"""Models from files of any format: `load`, `load_weights`, `vit_jax convert` and `init_from`."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Unpack

import jax
from absl import logging
from etils import epath
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.base import patterns, places, schema, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import descriptions, reading
from vit_jax.checkpoints.trained_model import TrainedModel
from vit_jax.config import default_config
from vit_jax.data.labels import imagenet
from vit_jax.data.labels.classes import UnknownNames
from vit_jax.devices import meshes
from vit_jax.interchange import (
    checkpoint_file,
    file_header,
    fitting,
    formats,
    orbax,
    remote,
    tensors_by_name,
)
from vit_jax.models import classifier, published, registry
from vit_jax.models.registry import Weights

if TYPE_CHECKING:
    from vit_jax.annotations import ComputeOptions, LoadOptions, ModelName, ModelOptions


def load(
    path: epath.PathLike,
    *,
    resize: str = "scipy",
    init_channels: str = "error",
    allow_nonfinite: bool = False,
    **overrides: "Unpack[LoadOptions]",
) -> nnx.Module:
    """A model from a checkpoint of any format; its `config` says what was recognised.

    >>> model = vit_jax.load("B_16.npz", image_size=384, num_classes=10)

    Args:
      path: file or directory, local or `gs://`.
      resize: how position embeddings of another resolution are interpolated: `scipy` (official),
        `bilinear`, `bicubic`, `torch`, `dinov2`, see `embeddings.interpolate`.
      init_channels: what is done where `channels` are others than the checkpoint's: `error`, or
        `mean`: each gets the mean of the old ones, scaled so that their sum stays.
      allow_nonfinite: whether tensors may have NaNs and infinities.
      **overrides: options of the model's config. Another `image_size` or `patch` resizes what
        depends on it, other `channels` change the first kernel, another `num_classes` or
        `representation` gives a new head (zero); any other states what the file holds.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged, or a tensor does not fit; see
        `formats.read_checkpoint`.
      ConfigError: an override is no option or value of the family, or the weights cannot be fitted
        to it.
    """
    names = registry.fitted_options()
    fitted = {name: overrides.pop(name) for name in names if name in overrides}
    if "image_size" in fitted:
        fitted |= file_header.image_size_option(fitted["image_size"])
    checkpoint = formats.read_checkpoint(
        path, hints=fitted, allow_nonfinite=allow_nonfinite, **overrides
    )
    source = checkpoint.model_config
    if "image_size" in fitted:
        fitted = source.options_for_image_size(fitted["image_size"]) | fitted
    target = formats.configure(type(source), vars(source), fitted)
    definition, like = registry.abstract_weights(target)
    reset = source.reset_patterns(target)
    weights = fit_weights(
        checkpoint,
        _fresh(target, like, reset),
        target,
        reset=reset,
        resize=resize,
        init_channels=init_channels,
        where=f"load({str(path)!r})",
        reset_option="load_weights(..., reset=...)",
    )
    return nnx.merge(definition, *weights)


def describe_checkpoint(checkpoint: formats.LoadedCheckpoint) -> dict:
    """What a checkpoint says of itself, as `reading.read_description` gives it; what a run of ours would say of one
    that is not of ours.
    """
    return checkpoint.run.description if checkpoint.run else orbax.described(checkpoint)[1]


def read_model(
    path: epath.PathLike, model_options: Mapping[str, Any] | None = None
) -> formats.LoadedCheckpoint:
    """What is at `path`, unread; see `load_run`."""
    options = dict(model_options or {})
    if options and formats.detect(path) == orbax.NAME:
        raise ConfigError(
            f"{path} says itself what its model and its classes are: leave --model and --classes out"
        )
    classes = tuple(options.pop("classes", ()))
    checkpoint = formats.read_checkpoint(path, **options)
    return with_classes(checkpoint, classes, path) if classes else checkpoint


def with_classes(
    checkpoint: formats.LoadedCheckpoint, classes: tuple[str, ...], path: epath.PathLike
) -> formats.LoadedCheckpoint:
    """The checkpoint with these names of its classes, in the order of the logits.

    Raises:
      ConfigError: they are not as many as the model has, or two are the same.
    """
    count = checkpoint.model_config.num_classes
    if len(classes) != count:
        raise ConfigError(
            f"{path}: the model has {count} classes, and {len(classes)} names are given for them: give one for each, "
            "in the order of its outputs"
        )
    if twice := [name for name in dict.fromkeys(classes) if classes.count(name) > 1]:
        raise ConfigError(f"{path}: the name {twice[0]!r} is given to several classes")
    if checkpoint.classes and tuple(checkpoint.classes) != classes:
        logging.warning("%s names its classes otherwise than --classes, which is taken", path)
    return dataclasses.replace(checkpoint, classes=classes)


def create_model(
    name: "ModelName | str",
    *,
    image_size: sizes.Size | str | None = None,
    seed: int = 0,
    **options: "Unpack[ModelOptions]",
) -> nnx.Module:
    """A model by name: a new one by a name of `vit_jax models`, a trained one by a name of timm.

    >>> model = vit_jax.create_model("ViT-B/16", num_classes=10, image_size=384, pool="mean")
    >>> model = vit_jax.create_model("vit_base_patch16_224.augreg_in21k", num_classes=10)

    Args:
      name: of a model; the weights of timm's names are downloaded from the hub.
      image_size: pixels of a side, or (height, width); by default what the model was published with.
      seed: of new parameters.
      **options: of the model's config; see `load` for those that trained weights can be fitted to.
    """
    if remote.timm_address(name):
        size: LoadOptions = {} if image_size is None else {"image_size": image_size}
        return load(name, **size, **options)
    return registry.create_model(name, image_size=image_size, seed=seed, **options)


def load_run(
    path: epath.PathLike,
    mesh: jax.sharding.Mesh | None = None,
    *,
    model_options: Mapping[str, Any] | None = None,
    **options: "Unpack[ComputeOptions]",
) -> TrainedModel:
    """A trained model and what is needed to use it, from a checkpoint of any format.

    Args:
      path: a run's workdir, its checkpoints folder, one checkpoint, or see `formats.read_checkpoint`.
      mesh: where the parameters go; by default whole on every device.
      model_options: options of the model of a checkpoint that is not of ours, where what is recognised is to
        differ, or it is not stored; and `classes`, their names in the order of the logits.
      **options: how the model is computed, where that should differ from the run: `dtype`, and options of the role
        'compute'.

    Returns:
      The model; of a checkpoint that is not of ours `config` says what is known of its images, and
      `step` is 0.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged, or see `formats.read_checkpoint`.
      ConfigError: an option has an invalid value, or see `formats.read_checkpoint`.
    """
    checkpoint = read_model(path, model_options)
    description, run = describe_checkpoint(checkpoint), checkpoint.run
    model_config = descriptions.stored_model_config(description, **options)
    definition, like = registry.abstract_weights(model_config)
    whole = meshes.replicated(mesh or meshes.replica_mesh())
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole), like)
    if run and not checkpoint.adapters:
        weights = reading.read_weights(run.folder, like)
    else:
        imagenet.log_if_unnamed(checkpoint.classes, checkpoint.model_config.num_classes, path)
        messages = dict(where=f"load_run({str(path)!r})", reset_option="reset")
        weights = fit_weights(checkpoint, like, model_config, **messages)
    return TrainedModel(
        model=nnx.merge(definition, *weights),
        model_config=model_config,
        config=schema.fill(default_config(), description["config"]),
        classes=_class_names(description),
        step=descriptions.step_of(run.folder, description) if run else 0,
        directory=run.folder if run else epath.Path(path),
        objective_modules=reading.read_modules(run.folder, description, model_config, whole)
        if run
        else None,
    )


def _class_names(description: dict) -> tuple[str, ...]:
    """The names of classes in a description; they are unknown if they are numbers and nothing was trained here."""
    classes = tuple(description["classes"])
    numbers = UnknownNames(map(str, range(len(classes))))
    is_trained = bool(description.get("training_examples", 1))
    return numbers if classes == numbers and not is_trained else classes


def resized(
    run: TrainedModel, image_size: sizes.Size | str, *, patch: int = 0, resize: str = "scipy"
) -> TrainedModel:
    """The same model for images of another size, in patches of another: what depends on it, such as position
    embeddings, is interpolated.

    Args:
      patch: in pixels; 0: as the model has it.
      resize: see `load`.

    Raises:
      ConfigError: the model cannot be fitted to these sizes.
    """
    source, size = run.model_config, sizes.parse(image_size)
    options = file_header.image_size_option(size) | source.options_for_image_size(size)
    options |= {"patch": patch} if patch else {}
    target = formats.configure(type(source), vars(source), options)
    definition, like = registry.abstract_weights(target)
    arrays = fitting.adapt(
        patterns.union(*registry.split(run.model)[1]),
        source,
        patterns.union(*like),
        target,
        reset=(),
        resize=resize,
        where=f"images of {sizes.size_text(size)} pixels",
        reset_option="reset",
    )
    config = prepared_at(run, size)
    return dataclasses.replace(
        run, model=nnx.merge(definition, *tensors_by_name.divided(arrays, like)), model_config=target, config=config
    )  # fmt: skip


def prepared_at(run: TrainedModel, size: sizes.Size) -> ConfigDict:
    """The run's config with images prepared at another size: the crop stays the same share of an image."""
    config = run.config.copy_and_resolve_references()
    stated = file_header.preprocessing_in(config.data)
    prepared = vars(published.at_size(stated, size, run.directory)) if stated else {}
    config.data.update(prepared | {"image_size": size})
    return config


def load_weights(
    model: nnx.Module,
    path: epath.PathLike,
    *,
    reset: Iterable[str] = (),
    resize: str = "scipy",
    init_channels: str = "error",
    allow_nonfinite: bool = False,
) -> None:
    """Replaces the arrays of a model by those of a checkpoint of any format.

    Args:
      model: changed in place; its arrays stay where they are placed.
      path: file or directory, local or `gs://`.
      reset: patterns of parameters that stay as they are, e.g. `("head/.*",)`; what the checkpoint
        has there is skipped.
      resize: see `load`.
      init_channels: see `load`.
      allow_nonfinite: see `load`.

    Raises:
      CheckpointError, ConfigError: as `load`; unless every tensor and every parameter is accounted
        for, nothing is changed.
    """
    checkpoint = formats.read_checkpoint(
        path, hints=vars(model.config), allow_nonfinite=allow_nonfinite
    )
    weights = fit_weights(
        checkpoint,
        registry.split(model)[1],
        model.config,
        reset=reset,
        resize=resize,
        init_channels=init_channels,
        where=f"load_weights({str(path)!r})",
        reset_option="reset",
    )
    nnx.update(model, *weights)


def fit_weights(
    checkpoint: formats.LoadedCheckpoint,
    like: Weights,
    config: classifier.ClassifierConfig,
    *,
    reset: Iterable[str] | None = (),
    resize: str = "scipy",
    where: str = "config.init_from",
    **options,
) -> Weights:
    """All arrays of a model from those of a checkpoint.

    Args:
      checkpoint: its arrays unread.
      like: the model's new arrays, or their shapes, dtypes and shardings where the checkpoint has
        them.
      config: the model's.
      reset, resize, where, **options: see `fitting.match`; `reset=None`: what a model of this config cannot take from
        one of the checkpoint's, such as a head of other classes.

    Returns:
      As `like`, in its shardings.
    """
    logging.info(
        "%s: %s holds %s",
        where,
        checkpoint.source,
        formats.describe_model(checkpoint.model_config, checkpoint.called),
    )
    arrays = fitting.adapt(
        patterns.union(checkpoint.params, checkpoint.variables),
        checkpoint.model_config,
        patterns.union(*like),
        config,
        reset=_reset_patterns(checkpoint, config, reset),
        resize=resize,
        where=where,
        **options,
    )
    checkpoint_file.forget()
    return tensors_by_name.divided(arrays, like)


def check_fit(
    checkpoint: formats.LoadedCheckpoint,
    like: Weights,
    config: classifier.ClassifierConfig,
    *,
    reset: Iterable[str] | None = (),
    **options,
) -> None:
    """Raises what `fit_weights` with these arguments would, as far as it is known before tensors are read."""
    fitting.match(
        patterns.union(checkpoint.params, checkpoint.variables),
        checkpoint.model_config,
        patterns.union(*like),
        config,
        reset=_reset_patterns(checkpoint, config, reset),
        **options,
    )


def _reset_patterns(
    checkpoint: formats.LoadedCheckpoint,
    config: classifier.ClassifierConfig,
    reset: Iterable[str] | None,
) -> Iterable[str]:
    """The patterns that are re-initialised: `reset`, or for `None` what `config` cannot take from the checkpoint."""
    if reset is not None:
        return reset
    same_family = type(checkpoint.model_config) is type(config)
    return checkpoint.model_config.reset_patterns(config) if same_family else ()


def convert(
    source: epath.PathLike,
    destination: epath.PathLike,
    to: str,
    *,
    data: Mapping[str, Any] | None = None,
    classes: Sequence[str] = (),
    thresholds: epath.PathLike = "",
    allow_nonfinite: bool = False,
    **overrides: "Unpack[LoadOptions]",
) -> formats.LoadedCheckpoint:
    """Rewrites a checkpoint in another format; see `formats.read_checkpoint` for what `overrides` do.

    Args:
      source: a checkpoint of any format.
      destination: a file or folder.
      to: the format.
      data: how images are prepared, where that should differ from what the source says, or it says
        nothing: `mean`, `std`, `eval_crop`, `eval_resize`, `interpolation`.
      classes: their names in the order of the logits, where the source does not say them.
      thresholds: a table of class and threshold, to keep with the model as `config.eval.thresholds`; see
        `data.labels.thresholds`.
      allow_nonfinite: whether tensors may have NaNs and infinities.

    Returns:
      What was written; its `params` can be read as long as the source is there.

    Raises:
      CheckpointError: the source cannot be read, or the format cannot express its model; then
        nothing is written.
      ConfigError: `data` has other fields than these, or mean or std stays unknown; or the table of thresholds is not
        one of the model's classes, or its probabilities are no sigmoids.
    """
    formats.module(to)
    destination = formats.to_write(destination, to)
    both = os.path.exists(source) and os.path.exists(destination)
    if both and os.path.samefile(source, destination):
        raise ConfigError(f"{destination} is the source itself: name another destination")
    checkpoint = formats.read_checkpoint(source, allow_nonfinite=allow_nonfinite, **overrides)
    if classes:
        checkpoint = with_classes(checkpoint, tuple(classes), source)
    if thresholds:
        checkpoint = _with_thresholds(checkpoint, thresholds)
    if data:
        stated = formats.preprocessing_with(checkpoint, data, source)
        checkpoint = file_header.with_preprocessing(checkpoint, stated)
    elif not checkpoint.preprocessing:
        logging.warning(
            "%s does not state how its images are normalised; users of the result have to set it",
            source,
        )
    formats.write_checkpoint(checkpoint, destination, to)
    return checkpoint


def _with_thresholds(
    checkpoint: formats.LoadedCheckpoint, path: epath.PathLike
) -> formats.LoadedCheckpoint:
    """The checkpoint with the thresholds of a table, see `convert`."""
    from vit_jax.data.labels.thresholds import read_thresholds  # for a few checkpoints alone

    if formats.probabilities_of(checkpoint) == "softmax":
        raise ConfigError(
            f"--thresholds={path}: thresholds are for sigmoids, and the model was trained with a softmax"
        )
    count = checkpoint.model_config.num_classes
    classes = checkpoint.classes or imagenet.names_if_unnamed(count)
    table = places.locate(path, "--thresholds")
    thresholds = read_thresholds(table, classes)
    settings = checkpoint.settings | {"eval.thresholds": list(thresholds)}
    return dataclasses.replace(checkpoint, settings=settings)


def _fresh(config: classifier.ClassifierConfig, like: Weights, reset: Iterable[str]) -> Weights:
    """`like` with new arrays for the parameters to reset; the others are never made."""
    names = patterns.names(like.params)
    to_reset = set(patterns.matching(reset, names))
    if not to_reset:
        return like

    def init(key: jax.Array) -> dict:
        leaves = jax.tree.leaves(registry.initialize(config, key))
        return {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in to_reset}

    new = jax.jit(init)(jax.random.key(0))
    return like._replace(
        params=patterns.map_named(lambda name, leaf: new.get(name, leaf), like.params)
    )
