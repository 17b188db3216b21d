"""Fingerprints of arrays: checkpoints keep one for every array, so that damage which file formats do not
notice is found when they are read.
"""

import hashlib

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.models.registry import Weights


@jax.jit
def fingerprint(parts: dict) -> dict[str, jax.Array]:
    """For each part of a state, uint32 (arrays,): the sum of each array's bits modulo 2³², which
    neither sharding nor devices change. One program, so that it costs one pass and one start.
    """

    def of(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            x = jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}")
        return jnp.sum(x.astype(jnp.uint32), dtype=jnp.uint32)

    return {name: jnp.stack([of(x) for x in jax.tree.leaves(part)]) for name, part in parts.items()}


def digest(weights: Weights) -> str:
    """A text that differs if a model's weights do; of arrays on devices."""
    sums = fingerprint({"weights": weights})["weights"]
    return hashlib.sha256(jax.device_get(sums).tobytes()).hexdigest()


def host_mark(array: np.ndarray) -> np.uint32:
    """An array's number in `fingerprint`, computed without a device."""
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = array.view(f"uint{8 * array.dtype.itemsize}")
    return np.sum(array, dtype=np.uint32)
