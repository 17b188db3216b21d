"""What the devices of all processes have computed of batches, brought to the host of each."""

import functools
from collections.abc import Callable, Iterable

import jax
import numpy as np
from jax.sharding import Mesh

from vit_jax.devices import meshes


def on_host(batches: Iterable[tuple[jax.Array, ...]], mesh: Mesh) -> list[np.ndarray]:
    """The arrays (B, …) of all batches, one after the other, in every process: (steps * B, …) each.

    What a batch gives is fetched while the next one is computed.
    """
    whole = _replicate(mesh)
    rows, waiting = [], None
    for batch in batches:
        waiting, previous = whole(tuple(batch)), waiting
        rows += [] if previous is None else [jax.device_get(previous)]
    rows.append(jax.device_get(waiting))
    return [np.concatenate(arrays) for arrays in zip(*rows, strict=True)]


@functools.cache  # so that it is compiled once, not for each evaluation
def _replicate(mesh: Mesh) -> Callable:
    return jax.jit(lambda arrays: arrays, out_shardings=meshes.replicated(mesh))
