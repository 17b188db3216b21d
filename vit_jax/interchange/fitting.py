"""Fits parameters to another model: a new head, another resolution, other channels.

The one place where parameters are re-initialised or resized; families define how they are resized.
Everything else must be the same, name by name.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.models import classifier, registry
from vit_jax.objectives.networks import OWN


def adapt(
    loaded: dict,
    source: classifier.ClassifierConfig,
    fresh: dict,
    target: classifier.ClassifierConfig,
    **options,
) -> dict:
    """The parameters to start from, each placed on its devices: never a whole copy on one.

    Args:
      loaded, source, target, **options: see `match`.
      fresh: those of the new model, or their shapes, dtypes and shardings where `loaded` has them.

    Returns:
      A tree like `fresh`, in its shardings.

    Raises:
      ConfigError: see `match`.
    """
    return take(fresh, *match(loaded, source, fresh, target, **options))


def take(
    fresh: dict,
    old: Mapping[str, Any],
    to_reset: Collection[str],
    layers: Mapping[str, np.ndarray],
    *,
    is_logged: bool = True,
) -> dict:
    """`fresh` with the arrays of a checkpoint, in its shardings.

    Args:
      fresh: nested dict, see `adapt`.
      old, to_reset, layers: see `match`.
      is_logged: whether the log says what is re-initialised.
    """
    names = [n for n in patterns.names(fresh) if n in to_reset or n in layers]
    if names and is_logged:
        numbers = {
            name: f" ({', '.join(map(str, np.flatnonzero(m)))})" for name, m in layers.items()
        }
        logging.info("re-initialised: %s", ", ".join(n + numbers.get(n, "") for n in names))

    def taken(name: str, leaf) -> jax.Array:
        if name in to_reset:
            return leaf
        array = placed(old[name], leaf)
        if name not in layers:
            return array
        mask = patterns.along(layers[name], leaf)
        select = jax.jit(lambda new, old: jnp.where(mask, new, old), out_shardings=leaf.sharding)
        return select(leaf, array)

    return patterns.map_named(taken, fresh)


def objective_patterns(reset: Iterable[str]) -> tuple[str, ...]:
    """Of the patterns of `config.init_reset`, those of what the objective owns: they begin with 'objective/'."""
    return tuple(pattern for pattern in reset if pattern.startswith(f"{OWN}/"))


def model_patterns(
    reset: Iterable[str], config: classifier.ClassifierConfig
) -> tuple[str, ...] | None:
    """Of the patterns of `config.init_reset`, those of the model; `None` if they name no more than the head, and a
    model of this config has none: then one in the checkpoint is skipped, if it has one.
    """
    own = objective_patterns(reset)
    of_model = tuple(pattern for pattern in reset if pattern not in own)
    if config.num_classes:
        return of_model
    return tuple(classifier.besides_heads(of_model)) or None


def match(
    loaded: dict,
    source: classifier.ClassifierConfig,
    fresh: dict,
    target: classifier.ClassifierConfig,
    *,
    reset: Iterable[str],
    resize: str,
    init_channels: str = "error",
    where: str = "config.init_from",
    reset_option: str = "config.init_reset",
) -> tuple[dict, set[str], dict[str, np.ndarray]]:
    """The parameters to start from by name, fitted and unread; the names of those to reset; and of others the layers
    to reset, (layers,) bool.

    Args:
      loaded: nested dict of arrays, `LazyArray` or not.
      source: the config of the model they come from.
      fresh: those of the new model, or their shapes.
      target: the new model's config.
      reset: patterns of parameters that keep their fresh values; what `loaded` has there is left
        out.
      resize: how position embeddings of another grid are interpolated, see
        `embeddings.interpolate`.
      init_channels: what is done about images of other channels: 'error', or 'mean', see
        `spread_channels`.
      where, reset_option: what to name in messages.

    Raises:
      ConfigError: the models are of different families or conventions; or parameters are missing,
        left over or of another shape, and `reset` does not cover them. All of them are named.
    """
    _check_conventions(source, target, where)
    old, new = patterns.named(loaded), patterns.named(fresh)
    reset = tuple(reset)
    shapes = {name: tuple(x.shape) for name, x in (old | new).items()}
    to_reset, layers = patterns.select(reset, shapes, reset_option)
    _check_channels(source, target, init_channels, to_reset, where)
    for name in old.keys() & new.keys() - to_reset:
        try:
            old[name] = _fitted(name, old[name], source, target, new[name].shape, resize)
        except ConfigError as error:
            raise ConfigError(f"{where}: {error} (or name in {reset_option} {name!r})") from error
    old_shapes, new_shapes = (
        {n: tuple(x.shape) for n, x in tree.items() if n not in to_reset} for tree in (old, new)
    )
    problems = [
        f"{n} {new_shapes[n]} is not in the checkpoint" for n in new_shapes if n not in old_shapes
    ]
    problems += [
        f"{n} {old_shapes[n]} is in the checkpoint, but not in the model"
        for n in old_shapes
        if n not in new_shapes
    ]
    problems += [
        f"{n} is {old_shapes[n]} in the checkpoint, {new_shapes[n]} in the model"
        for n in new_shapes
        if n in old_shapes and old_shapes[n] != new_shapes[n]
    ]
    if problems:
        raise ConfigError(
            f"{where}: the checkpoint does not fit the model (name in {reset_option} what is "
            "to re-initialise them):\n  " + "\n  ".join(problems)
        )
    return old, to_reset, layers


def placed(array: LazyArray, like: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """`array` with the dtype of `like`, and on its devices."""
    whole = np.asarray(array, like.dtype)
    if like.sharding is None:
        return jax.device_put(whole)
    # Each device gets only its own part, also of arrays that lie on devices of other processes too.
    return jax.make_array_from_callback(like.shape, like.sharding, lambda part: whole[part])


def _check_conventions(
    source: classifier.ClassifierConfig, target: classifier.ClassifierConfig, where: str
) -> None:
    families = [registry.family_name(registry.family_of(config)) for config in (source, target)]
    if families[0] != families[1]:
        raise ConfigError(
            f"{where}: the checkpoint holds a model of the family {families[0]}, the model "
            f"is of the family {families[1]}"
        )
    differ = [
        f"{name} is {getattr(source, name)!r} in the checkpoint, {getattr(target, name)!r} "
        "in the model"
        for name in schema.with_role(type(source), "convention")
        if hasattr(source, name) and getattr(source, name) != getattr(target, name)
    ]
    if differ:
        raise ConfigError(
            f"{where}: the model would compute other numbers with these weights: "
            f"{'; '.join(differ)}"
        )


def _check_channels(
    source: classifier.ClassifierConfig,
    target: classifier.ClassifierConfig,
    rule: str,
    to_reset: set[str],
    where: str,
) -> None:
    differ = source.channels != target.channels and not to_reset >= {*source.image_kernels}
    if differ and rule == "error":
        raise ConfigError(
            f"{where}: the checkpoint is for images of {source.channels} channels, the model for images of "
            f"{target.channels}. With init_channels='mean' every channel gets the mean of the checkpoint's, "
            "scaled so that their sum stays"
        )


def _fitted(
    name: str,
    old: Any,
    source: classifier.ClassifierConfig,
    target: classifier.ClassifierConfig,
    shape: tuple[int, ...],
    resize: str,
):
    """`old` as the target has it, where the family knows how; else as it is."""
    steps = [source.fit_parameter(name, target, resize=resize)]
    if name in source.image_kernels and source.channels != target.channels:
        steps.append(("the mean of its channels", lambda x: spread_channels(x, target.channels)))
    steps = [step for step in steps if step]
    if not steps:
        return old
    by = " and ".join(words for words, _ in steps)
    logging.info("%s: %s is fitted to %s by %s", name, tuple(old.shape), tuple(shape), by)

    def read() -> np.ndarray:
        array = np.asarray(old)
        for _, function in steps:
            array = function(array)
        return array

    return LazyArray(tuple(shape), np.dtype(old.dtype), read)


def spread_channels(kernel: np.ndarray, channels: int) -> np.ndarray:
    """A kernel (..., C, D) for images of other channels: each gets the mean over the old ones,
    scaled so that the sum over channels stays. For pixels that are the same in all channels the
    result stays as before.
    """
    mean = kernel.mean(-2, keepdims=True, dtype=np.float64) * (kernel.shape[-2] / channels)
    return np.repeat(mean, channels, axis=-2).astype(kernel.dtype)
