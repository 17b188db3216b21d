"""New models. Op by op the weights of a small ViT are thirty programs; here they are one, or none."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from flax import nnx

from vit_jax.models import registry


def new_model(config, seed: int = 0) -> nnx.Module:
    """`registry.build` with `seed`."""
    return nnx.jit(lambda: registry.build(config, rngs=nnx.Rngs(seed)))()


def new_weights(config, seed: int = 0) -> registry.Weights:
    """All arrays of `new_model`."""
    return registry.split(new_model(config, seed))[1]


def drawn(make: Callable[[], nnx.Module], seed: int = 0) -> nnx.Module:
    """What `make` builds, its parameters drawn by NumPy, scales near 1 and others about 1/sqrt(inputs); statistics are
    those of no batch.
    """
    definition, params, statistics = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    random = np.random.default_rng(seed)
    for path, leaf in nnx.to_flat_state(params):
        noise = random.standard_normal(leaf.shape).astype(np.float32)
        inputs = max(1, np.prod(leaf.shape[:-1]))
        leaf.set_value(jnp.asarray(noise / np.sqrt(inputs) + (path[-1] == "scale")))
    for path, leaf in nnx.to_flat_state(statistics):
        start = {"mean": 0, "var": 1, "std": 1}[path[-1]]
        leaf.set_value(jnp.asarray(np.full(leaf.shape, start, np.float32)))
    return nnx.merge(definition, params, statistics)
