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
    """`function` of all matrices, in stacks.

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
    for names in matrices.stacks().values():
        views = [matrices.view(name, leaves[name]).astype(dtype) for name in names]
        padding = jnp.zeros((-sum(map(len, views)) % _devices(), *views[0].shape[1:]), dtype)
        stack = gathered(function(scattered(jnp.concatenate([*views, padding]))).astype(dtype))
        ends = itertools.accumulate(map(len, views))
        for name, part in zip(names, jnp.split(stack, list(ends))[:-1], strict=True):
            results[name] = matrices.restore(name, part).astype(jnp.float32)
    return patterns.map_named(lambda name, _: results[name], tree)


def scattered(stack: jax.Array) -> jax.Array:
    """A stack whose first axis is sharded over all axes of the mesh that is set, if one is."""
    return _sharded(_sharded(stack, _WITHIN_COPY), _ALL)


def gathered(stack: jax.Array) -> jax.Array:
    """The way back: a copy of a `scattered` stack in each replica, from where parameters are taken."""
    return _sharded(_sharded(stack, _ALL), _WITHIN_COPY)


# What each replica has a copy of is split among the replicas last and put together first. Left to
# find these steps itself, the partitioner gathers whole stacks on each device.
_WITHIN_COPY = SIZES
_ALL = (*_WITHIN_COPY, *(axis for axis in AXES if axis not in SIZES))


def _sharded(stack: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    return stack if _devices() == 1 else jax.lax.with_sharding_constraint(stack, P(axes))


def _devices() -> int:
    """How many devices the mesh that is set has."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.size if set(AXES) <= set(mesh.axis_names) else 1
