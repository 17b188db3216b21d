"""Matrices of equal shape as one stack that is sharded over all devices: what every preconditioner
computes with.

How parameters are stored is not how they are computed with here. The kernels of all layers, queries,
keys, values and outputs together, lie in one array whose first axis is sharded over all axes of the
mesh. So each device has whole matrices of its own: products need no communication, and no device
repeats another's. Only to get there and back the devices exchange data, an all-to-all each way.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
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
    """`function` of all matrices, in stacks that are padded with zeros to a multiple of the devices.

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


def devices_used(count: int, devices: int) -> int:
    """How many of all devices have matrices of a stack of `count`."""
    return -(-count // -(-count // devices))


# What each replica has a copy of is split among the replicas last, and put together first. Left to
# find these steps itself, the partitioner gathers whole stacks on each device.
_WITHIN_COPY = SIZES
_ALL = (*_WITHIN_COPY, *(axis for axis in AXES if axis not in SIZES))


def _scattered(
    function: Callable[[jax.Array], jax.Array], views: list[jax.Array], *, from_the_end: bool
) -> list[jax.Array]:
    """`function` of the stack of these arrays, sharded over all axes of the mesh that is set, if one is."""
    mesh, count = jax.sharding.get_abstract_mesh(), sum(map(len, views))
    if mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return _split(function(jnp.concatenate(views)), views)
    used = devices_used(count, mesh.size)
    padding = jnp.zeros((-count % mesh.size, *views[0].shape[1:]), views[0].dtype)
    padded = [padding, *views] if from_the_end else [*views, padding]

    def of_device(part: jax.Array) -> jax.Array:
        if used == mesh.size:
            return function(part)
        place = jax.lax.axis_index(_ALL)
        place = mesh.size - 1 - place if from_the_end else place
        return jax.lax.cond(place < used, function, lambda x: x, part)

    stack = _constrained(_constrained(jnp.concatenate(padded), _WITHIN_COPY), _ALL)
    stack = jax.shard_map(of_device, in_specs=P(_ALL), out_specs=P(_ALL), check_vma=False)(stack)
    parts = _split(_constrained(stack, _WITHIN_COPY), padded)
    return parts[1:] if from_the_end else parts[:-1]


def _constrained(stack: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return jax.lax.with_sharding_constraint(stack, P(axes))


def _split(stack: jax.Array, like: list[jax.Array]) -> list[jax.Array]:
    """The arrays that were concatenated."""
    ends = list(itertools.accumulate(map(len, like)))
    return [stack[end - len(x) : end] for end, x in zip(ends, like, strict=True)]
