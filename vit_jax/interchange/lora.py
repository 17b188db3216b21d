"""The whole model of a run with adapters, whose checkpoints hold only these and what else is trained: its base is
read from where it was, and must be the same.
"""

import functools

import jax
import numpy as np
from etils import epath

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.checkpoints import fingerprints
from vit_jax.checkpoints.lora import BASE, adapters_in
from vit_jax.interchange import fitting, formats
from vit_jax.models import classifier, lora
from vit_jax.models.lora import ADAPTERS
from vit_jax.models.registry import Weights


def whole_model(
    folder: epath.Path,
    description: dict,
    trained: dict,
    like: Weights,
    config: classifier.ClassifierConfig,
) -> dict:
    """All parameters of the model, the adapters added to the kernels; each is computed when it is used.

    Args:
      folder: of the checkpoint.
      description: its own.
      trained: what it holds of the model.
      like: shapes and dtypes of the whole model.
      config: the model's, as the run had it.

    Raises:
      CheckpointError: the base is not where it was, or cannot be read; or, when the arrays are used, it has other
        weights than that which the adapters were trained for.
    """
    base = _base(folder, description, like, config)

    rest = {name: tree for name, tree in trained.items() if name != ADAPTERS}
    return patterns.union(lora.adapted(base, trained[ADAPTERS], lora.add_lazily), rest)


def _base(
    folder: epath.Path, description: dict, like: Weights, config: classifier.ClassifierConfig
) -> dict:
    """The frozen parameters, unread; verified when the first of them is read."""
    stated, init = description[BASE], description["config"]
    reset = fitting.model_patterns(init["init_reset"], config)
    where = f"{folder} holds adapters of the base {stated['path']}"
    try:
        source = formats.read_checkpoint(stated["path"], hints=vars(config))
        old, *_ = fitting.match(
            patterns.union(source.params, source.variables),
            source.model_config,
            patterns.union(*like),
            config,
            reset=source.model_config.reset_patterns(config) if reset is None else reset,
            resize=init["init_resize"],
            init_channels=init["init_channels"],
            where=where,
        )
    except (CheckpointError, ConfigError) as error:
        raise CheckpointError(f"{where}, which cannot be used: {error}") from error
    frozen, _ = adapters_in(description).split(like.params)
    unread = patterns.map_named(lambda name, leaf: old[name], frozen)

    @functools.cache
    def verify() -> None:
        arrays = (np.asarray(x, np.float32) for x in jax.tree.leaves(unread))
        if not fingerprints.is_digest_on_host(stated["digest"], arrays):
            raise CheckpointError(
                f"{where}, which has other weights now (their fingerprint differs): put the base back"
            )

    def verified(leaf) -> LazyArray:
        def read() -> np.ndarray:
            verify()
            return np.asarray(leaf, np.float32)

        return LazyArray(tuple(leaf.shape), np.dtype(np.float32), read)

    return jax.tree.map(verified, unread)
