"""Models from files of any format: `load`, `load_weights`, `vit_jax convert` and `init_from`."""

import dataclasses
from collections.abc import Iterable

import jax
from absl import logging
from flax import nnx
from ml_collections import ConfigDict

from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import CHECKPOINT
from vit_jax.interchange import adapt, formats
from vit_jax.models import mixer, registry
from vit_jax.models.registry import Weights


def load(path, *, resize: str = "scipy", **overrides) -> nnx.Module:
    """A model from a checkpoint of any format; its `config` says what was recognised.

    >>> model = vit_jax.load("B_16.npz", image_size=384, num_classes=10)

    Args:
      path: file or directory, local or `gs://`.
      resize: how position embeddings of another resolution are interpolated: `scipy` (official),
        `bilinear`, `bicubic`.
      **overrides: options of the model's config. Another `image_size` or `patch` resizes what
        depends on it, another `num_classes` or `representation` gives a new head (zero); any
        other states what the file holds.

    Raises:
      CheckpointError: there is no checkpoint, it is damaged, or a tensor does not fit; see
        `formats.read`.
      ConfigError: an override is no option or value of the family, or the weights cannot be fitted
        to it.
    """
    named = registry.fitted_options()
    fitted = {name: overrides.pop(name) for name in named if name in overrides}
    foreign = formats.read(path, **overrides)
    source = foreign.model_config
    if isinstance(source, mixer.Config):
        image_size = fitted.get("image_size", source.image_size)
        fitted["token_mlp_dim"] = _token_mlp_dim(source, image_size)
    target = formats.configure(type(source), dataclasses.asdict(source), fitted)
    definition, like = registry.abstract(target)
    reset = []
    if target.num_classes != source.num_classes:
        reset.append("head(_distilled)?/.*")
    if getattr(target, "representation", 0) != getattr(source, "representation", 0):
        reset += ["representation/.*", "head/.*"]
    fresh = _fresh(target, like, reset)
    where, option = f"load({str(path)!r})", "load_weights(..., reset=...)"
    params = adapt.adapt(
        foreign.params,
        source,
        fresh,
        target,
        reset=reset,
        resize=resize,
        where=where,
        reset_option=option,
    )
    return nnx.merge(definition, params)


def load_weights(
    model: nnx.Module, path, *, reset: Iterable[str] = (), resize: str = "scipy"
) -> None:
    """Replaces the parameters of a model by those of a checkpoint of any format.

    Args:
      model: changed in place; its parameters stay where they are placed.
      path: file or directory, local or `gs://`.
      reset: patterns of parameters that stay as they are, e.g. `("head/.*",)`; what the checkpoint
        has there is left out.
      resize: how position embeddings of another resolution are interpolated.

    Raises:
      CheckpointError, ConfigError: as `load`; unless every tensor and every parameter is accounted
        for, nothing is changed.
    """
    fresh = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    nnx.update(
        model,
        load_params(
            path,
            fresh,
            model.config,
            reset=reset,
            resize=resize,
            where="load_weights",
            option="reset",
        ),
    )


def load_params(
    path,
    fresh: dict,
    config,
    *,
    reset: Iterable[str],
    resize: str,
    where="config.init_from",
    option="config.init_reset",
) -> dict:
    """Parameters for a model from a checkpoint of any format.

    Args:
      path: see `formats.read`.
      fresh: the model's new parameters, on their devices.
      config: the model's.
      reset, resize, where, option: see `adapt.adapt`.

    Returns:
      A tree like `fresh`, in its shardings.
    """
    foreign = formats.read(path, like=config)
    logging.info("%s: %s holds %s", where, path, formats.describe(foreign.model_config))
    return adapt.adapt(
        foreign.params,
        foreign.model_config,
        fresh,
        config,
        reset=reset,
        resize=resize,
        where=where,
        reset_option=option,
    )


def load_weights_like(path, like: Weights, config, *, where: str) -> Weights:
    """All arrays of the model in a checkpoint, in the shardings of `like`.

    Args:
      path: see `formats.read`.
      like: shapes, dtypes and shardings of a model of `config`, which is the checkpoint's own.
      where: what to name in messages.
    """
    foreign = formats.read(path, like=config)
    trees = zip((foreign.params, foreign.variables), like, strict=True)
    return Weights(
        *(
            adapt.adapt(tree, foreign.model_config, part, config, reset=(), resize="scipy",
                        where=where, reset_option="")
            for tree, part in trees
        )
    )  # fmt: skip


def convert(source, destination, to: str, **overrides) -> formats.Foreign:
    """Rewrites a checkpoint in another format; see `formats.read` for what `overrides` do.

    Returns:
      What was written; its `params` can be read as long as the source is there.

    Raises:
      CheckpointError: the source cannot be read, or the format cannot express its model; then
        nothing is written.
    """
    formats.module(to)
    foreign = formats.read(source, **overrides)
    formats.write(foreign, destination, to)
    return foreign


def resolve_from_checkpoint(config: ConfigDict, workdir=None) -> ConfigDict:
    """A run's config whose open options of the model are those of the checkpoint it starts from.

    These are the options of its structure and conventions (see `schema.option`); with
    `config.model.name=''` also name and sizes; and `config.data.mean` and `std` where they are
    empty. A run that was begun in `workdir`, if that is given, keeps what it took then.

    Raises:
      CheckpointError: the checkpoint to start from cannot be read.
      ConfigError: the recipe needs a checkpoint, or name, mean or std are left to one, and there is
        none, or none that says.
    """
    if config.init_from == CHECKPOINT:
        raise ConfigError(
            "this recipe starts from a checkpoint: say which with --config.init_from=DIR_OR_FILE, a "
            "run of yours or a file of any format in docs/checkpoints.md"
        )
    if not config.init_from:
        if not (config.model.name and config.data.mean and config.data.std):
            raise ConfigError(
                "config.model.name, data.mean or data.std is empty, which leaves it to the checkpoint "
                "to start from: say which with --config.init_from=CHECKPOINT"
            )
        return config
    begun = reading.newest_description(workdir) if workdir else None
    begun = begun and begun["config"]
    source = None if begun else formats.read(config.init_from)
    whole = not config.model.name
    config = config.copy_and_resolve_references()
    model = config.model
    if whole:
        model.name = begun["model"]["name"] if begun else formats.model_name(source.model_config)
    family = next(
        (f for f in registry.FAMILIES if f.options_from_name(model.name) is not None), None
    )
    # What the weights are used for; the name stands for their sizes, unless it is the checkpoint's.
    roles = ("structure", "convention", "size") if whole else ("structure", "convention")
    for name in schema.with_role(family.Config, *roles) if family else ():
        if model[name] is not None:
            continue
        if name == "representation" and patterns.matching(
            config.init_reset, ["representation/kernel"]
        ):
            continue
        value = begun["model"].get(name) if begun else getattr(source.model_config, name, None)
        if name == "token_mlp_dim" and source:
            value = _token_mlp_dim(source.model_config, config.data.image_size)
        if value is not None:
            model[name] = value
    prepared = begun["data"] if begun else source.preprocessing and vars(source.preprocessing)
    for name in ("mean", "std"):
        if config.data[name]:
            continue
        if not prepared:
            raise ConfigError(
                f"{config.init_from} does not say how images are normalised: say config.data.mean and "
                "std, (0.5, 0.5, 0.5) both for Google's weights, (0.485, 0.456, 0.406) and "
                "(0.229, 0.224, 0.225) for DeiT's"
            )
        config.data[name] = tuple(prepared[name])
    return config


def _token_mlp_dim(source: mixer.Config, image_size: int) -> int:
    """Images K times as large take K² copies of a Mixer's MLP over tokens (Mixer §C)."""
    return source.token_mlp_dim * max(image_size // source.image_size, 1) ** 2


def _fresh(config, like: dict, reset: Iterable[str]) -> dict:
    """`like` with new arrays for the parameters to reset; the others are never made."""
    names = patterns.names(like)
    anew = set(patterns.matching(reset, names))
    if not anew:
        return like

    def init(key: jax.Array) -> dict:
        leaves = jax.tree.leaves(registry.initialize(config, key))
        return {name: leaf for name, leaf in zip(names, leaves, strict=True) if name in anew}

    new = jax.jit(init)(jax.random.key(0))
    return patterns.map_named(lambda name, leaf: new.get(name, leaf), like)
