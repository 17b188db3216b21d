"""Fits parameters to another model: a new head, another resolution or patch size.

The one place where parameters are started anew or resized. Everything else must be the same,
name by name.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np
from absl import logging

from vit_jax.base import patterns, schema
from vit_jax.base.errors import ConfigError
from vit_jax.interchange.formats import Foreign
from vit_jax.interchange.rules import Lazy
from vit_jax.models import mixer, vit
from vit_jax.models.embeddings import interpolate, resize_patch_embedding, sincos_2d
from vit_jax.models.mixer import enlarge_token_mlp

POSITION = "position"
PATCHES = "embedding/kernel"


def adapt(
    loaded: dict,
    source,
    fresh: dict,
    target,
    *,
    reset: Iterable[str],
    resize: str,
    where: str = "config.init_from",
    reset_option: str = "config.init_reset",
) -> dict:
    """The parameters to start from, each placed on its devices: never a whole copy on one.

    Args:
      loaded: nested dict of arrays, `Lazy` or not.
      source: the config of the model they come from.
      fresh: those of the new model, or their shapes, dtypes and shardings where `loaded` has them.
      target: the new model's config.
      reset: patterns of parameters that keep their fresh values; what `loaded` has there is left
        out.
      resize: how position embeddings of another grid are interpolated, see
        `embeddings.interpolate`.
      where, reset_option: what to name in messages.

    Returns:
      A tree like `fresh`, in its shardings.

    Raises:
      ConfigError: the models are of different families or conventions; or a parameter is missing,
        left over or of another shape, and nothing said so. All of them are named.
    """
    _check_conventions(source, target, where)
    old, new = _named(_enlarged(loaded, source, target)), _named(fresh)
    reset = tuple(reset)
    patterns.check_patterns(reset, [*new, *old], reset_option)
    anew = set(patterns.matching(reset, [*new, *old]))
    for name in old.keys() & new.keys() - anew:
        if old[name].shape != new[name].shape:
            old[name] = _resized(name, old[name], source, target, resize)
    old_shapes, new_shapes = (
        {n: tuple(x.shape) for n, x in tree.items() if n not in anew} for tree in (old, new)
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
            "to start anew):\n  " + "\n  ".join(problems)
        )
    if anew:
        logging.info("start anew: %s", ", ".join(name for name in new if name in anew))

    def place(name: str, leaf) -> jax.Array:
        if name in anew:
            return leaf
        array = np.asarray(old[name], leaf.dtype)
        if leaf.sharding is None:
            return jax.device_put(array)
        # Each device gets its part alone, of arrays too that other processes have devices of.
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda part: array[part])

    return patterns.map_named(place, fresh)


def with_learned_position(foreign: Foreign) -> Foreign:
    """The same model with its fixed position embedding, or zeros for none, as a learned one."""
    config = foreign.model_config
    if getattr(config, "position", "learned") == "learned":
        return foreign
    sincos = config.position == "sincos2d"
    table = (
        sincos_2d(config.grid, config.width)
        if sincos
        else np.zeros((1, config.grid[0] * config.grid[1], config.width), np.float32)
    )
    config = dataclasses.replace(config, position="learned", position_of_class=False)
    return dataclasses.replace(
        foreign, model_config=config, params=foreign.params | {POSITION: table}
    )


def with_class_row(foreign: Foreign) -> Foreign:
    """The same model with positions of class and distillation token: zero if it had none."""
    config = foreign.model_config
    if (
        not isinstance(config, vit.Config)
        or config.pool != "token"
        or config.position != "learned"
        or config.prefix
    ):
        return foreign
    table = np.asarray(foreign.params[POSITION])
    rows = np.zeros((1, config.placed_tokens, config.width), table.dtype)
    table = np.concatenate([rows, table], axis=1)
    config = dataclasses.replace(config, position_of_class=True)
    return dataclasses.replace(
        foreign, model_config=config, params=foreign.params | {POSITION: table}
    )


def without_class_row(foreign: Foreign) -> Foreign:
    """The same model without a position of the class token: what it had is added to the token."""
    config = foreign.model_config
    if not isinstance(config, vit.Config) or config.prefix != 1:
        return foreign
    table, token = (np.asarray(foreign.params[name]) for name in (POSITION, "class_token"))
    params = foreign.params | {POSITION: table[:, 1:], "class_token": token + table[:, :1]}
    return dataclasses.replace(
        foreign, model_config=dataclasses.replace(config, position_of_class=False), params=params
    )


def _check_conventions(source, target, where: str) -> None:
    families = [config.__class__.__module__.split(".")[-1] for config in (source, target)]
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


def _resized(name: str, old: Any, source, target, method: str):
    """`old` in the target's shape, where there is a rule for that."""
    if name == POSITION and source.prefix == target.prefix and source.width == target.width:

        def resize(x):
            return interpolate(
                x, target.grid, method=method, prefix=source.prefix, old_grid=source.grid
            )

        shape = (1, target.prefix + target.grid[0] * target.grid[1], target.width)
    elif name == PATCHES and type(target) in (vit.Config, mixer.Config):

        def resize(x):
            return resize_patch_embedding(x, target.patch)

        method, shape = "pseudo-inverse", (target.patch, target.patch, *old.shape[2:])
    else:
        return old
    logging.info("%s: %s is resized to %s by %s", name, old.shape, shape, method)
    return Lazy(shape, np.dtype(old.dtype), lambda: resize(np.asarray(old)))


def _enlarged(loaded: dict, source, target) -> dict:
    """A Mixer's parameters for images K times as large, if the target's token MLP is K² times."""
    if not isinstance(source, mixer.Config):
        return loaded
    factor, rest = divmod(target.image_size, source.image_size)
    if factor < 2 or rest or target.token_mlp_dim != factor**2 * source.token_mlp_dim:
        return loaded
    layers = loaded["layers"]
    token_mlp = enlarge_token_mlp(jax.tree.map(np.asarray, layers["token_mlp"]), factor)
    return loaded | {"layers": layers | {"token_mlp": token_mlp}}


def _named(tree: dict) -> dict[str, Any]:
    return dict(zip(patterns.names(tree), jax.tree.leaves(tree), strict=True))
