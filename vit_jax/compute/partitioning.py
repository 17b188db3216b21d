"""Activations on the mesh that is set, if one is. How the mesh is made and parameters lie on it is in
`devices.meshes`.
"""

from collections.abc import Callable

import jax
from jax.sharding import PartitionSpec as P

from vit_jax.devices.meshes import AXES, BATCH


def constrain_batch(x: jax.Array) -> jax.Array:
    """Keeps the first axis of an activation cut as the batch is, where a mesh is set; else XLA may
    prefer to move activations.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(BATCH) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, P(BATCH))


def gather_kernel(kernel: jax.Array) -> jax.Array:
    """A depth-wise kernel (S, S, 1, C) whole on every replica, but for the channels that `tensor` cuts.

    Kernels of products XLA gathers without being told; where one of these is cut over `fsdp`, it would
    rather move the activations of the whole batch.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return kernel
    channels = "tensor" if kernel.shape[-1] % mesh.shape["tensor"] == 0 else None
    return jax.lax.with_sharding_constraint(kernel, P(None, None, None, channels))


def per_device(function: Callable, *arrays: jax.Array) -> jax.Array:
    """`function` of each device's part of arrays (B, N, H, ...): batch and heads are cut, and nothing
    is exchanged.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not set(AXES) <= set(mesh.axis_names):
        return function(*arrays)
    heads = "tensor" if arrays[0].shape[2] % mesh.shape["tensor"] == 0 else None
    spec = P(BATCH, None, heads)
    return jax.shard_map(function, in_specs=(spec,) * len(arrays), out_specs=spec, check_vma=False)(
        *arrays
    )
