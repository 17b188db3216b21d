"""Matrices of equal shape as one stack that is sharded over all devices: what every preconditioner
computes with.

How parameters are stored is not how they are computed with here. The kernels of all layers, queries,
keys, values and outputs together, lie in one array whose first axis is sharded over all axes of the
mesh. So each device has whole matrices of its own: products need no communication, and no device
repeats another's. Only to get there and back the devices exchange data: an all-to-all each way among
the devices of a replica, which split what each of them holds with the same device of other replicas.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from vit_jax.base import patterns
from vit_jax.devices.meshes import AXES, SIZES
from vit_jax.optim.matrices import Matrices


def apply(
    function: Callable[[jax.Array], jax.Array],
    tree: Any,
    matrices: Matrices,
    *,
    dtype: jax.typing.DTypeLike = jnp.float32,
) -> Any:
    """`function` of all matrices, in stacks that are padded with zeros where the devices do not divide them.

    Args:
      function: (N, m, n) -> (N, m, n), for matrices with m <= n (others come transposed), each for
        itself.
      tree: arrays like the parameters, of which all are matrices.
      matrices: how they are.
      dtype: in which devices exchange them, and in which `function` gets them.

    Returns:
      A tree like `tree`, float32.
    """
    leaves, results = patterns.named(tree), {}
    for turn, names in enumerate(matrices.stacks().values()):
        views = [matrices.view(name, leaves[name]).astype(dtype) for name in names]
        # Of two stacks that do not fill the devices, one lies on the first and one on the last.
        parts = _scattered(
            lambda stack: function(stack).astype(dtype), views, from_the_end=turn % 2 == 1
        )
        for name, part in zip(names, parts, strict=True):
            results[name] = matrices.restore(name, part).astype(jnp.float32)
    return patterns.map_named(lambda name, _: results[name], tree)


def load(count: int, sizes: Mapping[str, int], *, from_the_end: bool) -> np.ndarray:
    """How many matrices of a stack each device of a mesh computes with: (replicas, devices of one).

    Args:
      count: of the stack.
      sizes: of the mesh's axes.
      from_the_end: see `apply`; every other stack.
    """
    replicas, devices = sizes[REPLICA], math.prod(sizes[axis] for axis in SIZES)
    held, own = _slots(count, devices, replicas)
    first = np.arange(replicas)[:, None] * own
    after = np.minimum(held, count - np.arange(devices) * held)  # the last that is not padding
    found = np.where(first < after, own, 0)
    return found[::-1, ::-1] if from_the_end else found


REPLICA = AXES[0]


def _slots(count: int, devices: int, replicas: int) -> tuple[int, int]:
    """How many matrices a device of a replica holds, and how many of them it computes with."""
    held = -(-count // devices)
    return held, -(-held // replicas)


def _scattered(
    function: Callable[[jax.Array], jax.Array], views: list[jax.Array], *, from_the_end: bool
) -> list[jax.Array]:
    """`function` of the stack of these arrays, on the mesh that is set, if one is."""
    mesh, count = jax.sharding.get_abstract_mesh(), sum(map(len, views))
    if mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return _split(function(jnp.concatenate(views)), views)
    replicas = mesh.shape[REPLICA]
    held, own = _slots(count, mesh.size // replicas, replicas)
    padding = mesh.size // replicas * held - count
    padding = jnp.zeros((padding, *views[0].shape[1:]), views[0].dtype)
    padded = [padding, *views] if from_the_end else [*views, padding]
    loads = load(count, mesh.shape, from_the_end=from_the_end)

    def of_device(part: jax.Array) -> jax.Array:
        place = jax.lax.axis_index(REPLICA), jax.lax.axis_index(SIZES)
        turn = replicas - 1 - place[0] if from_the_end else place[0]
        room = jnp.zeros((replicas * own, *part.shape[1:]), part.dtype)
        mine = jax.lax.dynamic_slice_in_dim(room.at[:held].set(part), turn * own, own)
        if loads.all():
            mine = function(mine)
        else:
            busy = jnp.asarray(loads > 0)[place]
            mine = jax.lax.cond(busy, function, lambda x: x, mine)
        if replicas == 1:
            return mine
        # Replicas have few matrices each, or none: to add them up takes less than to gather all.
        room = jax.lax.dynamic_update_slice_in_dim(room, mine, turn * own, 0)
        return jax.lax.psum(room[:held], REPLICA)

    stack = jax.lax.with_sharding_constraint(jnp.concatenate(padded), P(SIZES))
    stack = jax.shard_map(of_device, in_specs=P(SIZES), out_specs=P(SIZES), check_vma=False)(stack)
    stack = jax.lax.with_sharding_constraint(stack, P(SIZES))
    parts = _split(stack, padded)
    return parts[1:] if from_the_end else parts[:-1]


def _split(stack: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """The arrays that were concatenated."""
    ends = list(itertools.accumulate(map(len, like)))
    return [stack[end - len(x) : end] for end, x in zip(ends, like, strict=True)]
