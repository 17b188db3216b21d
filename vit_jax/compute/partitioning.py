"""Activations on the mesh that is set, if one is. How the mesh is made and parameters lie on it is in
`devices.meshes`.
"""

import math
from collections.abc import Callable, Sequence

import jax
from jax.sharding import PartitionSpec as P

from vit_jax.compute.platform import by_platform
from vit_jax.devices.meshes import AXES, BATCH


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keeps the first axis of an activation sharded as the batch is, where a mesh is set; else XLA may
    prefer to move activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(BATCH) <= set(mesh.axis_names):
        return x
    return in_rows(jax.lax.with_sharding_constraint(x, P(BATCH)))


def replicated(x: jax.Array) -> jax.Array:
    """A vector whole on every device, where a mesh is set. If it is a sum over tokens whose shards are wanted, XLA may
    gather the tokens instead of reducing what each device has.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return jax.lax.with_sharding_constraint(x, P()) if mesh.axis_names else x


@by_platform
def in_rows(x: jax.Array) -> jax.Array:
    """Keeps tokens (B, N, D) in this order in memory, on platforms that would choose another one."""
    return x


def by_batch(function: Callable, *arrays: jax.Array) -> jax.Array:
    """`function` of each device's part of arrays that are sharded as the batch is, to an array that is. Nothing is
    exchanged: a loop that runs until all examples are done would else ask all devices before each round.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(BATCH) <= set(mesh.axis_names) or len(arrays[0]) % _shards(mesh):
        return function(*arrays)
    return jax.shard_map(function, in_specs=P(BATCH), out_specs=P(BATCH), check_vma=False)(*arrays)


def _shards(mesh: jax.sharding.AbstractMesh) -> int:
    return math.prod(mesh.shape[axis] for axis in BATCH)


def gather_kernel(kernel: jax.Array) -> jax.Array:
    """A depth-wise kernel (S, S, 1, C), its channels sharded over `tensor`, all else whole on every replica.

    Kernels of products XLA gathers by itself; where one of these is sharded over `fsdp`, it would
    rather move the activations of the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return kernel
    channels = "tensor" if kernel.shape[-1] % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(kernel, P(None, None, None, channels))


def per_device(
    function: Callable,
    *arrays: jax.Array,
    heads: int,
    axes: Sequence[int | None],
    out_axes: Sequence[int],
) -> tuple[jax.Array, ...]:
    """`function` of each device's part of the arrays, with nothing exchanged: images are sharded as
    the batch is, and heads over `tensor`, where their number allows.

    Args:
      function: gives a tuple of arrays.
      arrays: the batch is axis 0.
      heads: how many heads there are.
      axes: along which axis of each array heads lie; they may share it with their features. `None` if it
        has none.
      out_axes: the same of each result.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return function(*arrays)
    batch = BATCH if len(arrays[0]) % _shards(mesh) == 0 else None
    tensor = "tensor" if heads % mesh.shape["tensor"] == 0 else None

    def specs(axes):
        return tuple(
            P(batch) if axis is None else P(batch, *[None] * (axis - 1), tensor) for axis in axes
        )

    return jax.shard_map(
        function, in_specs=specs(axes), out_specs=specs(out_axes), check_vma=False
    )(*arrays)
