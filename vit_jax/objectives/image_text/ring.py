"""All images of a batch against all texts, while every device keeps its own images: blocks of texts go around a ring
of the devices, and no device gathers them. What is computed of a block and its images, a loss says.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from vit_jax.devices.meshes import BATCH

CHUNK = 1024  # texts of a block at once: that many columns of the logits are in memory

# (carry, block of texts) -> the same two, after the device's images have met the block.
Visit = Callable[[Any, Any], tuple[Any, Any]]
Ring = Callable[[Visit, Any, Any], tuple[Any, Any]]


def over_devices(function: Callable, *arrays: jax.Array) -> Any:
    """`function(ring, total, *arrays)` on each device of the mesh that is set, or once where none is.

    Args:
      function: gets `ring(visit, carry, block)`, which visits all blocks and gives the last carry and the device's own
        block; `total`, the sum over devices of a pytree; and the device's rows of the arrays. Its results are vectors
        and matrices with a row for each of these, and scalars, the same on all devices.
      arrays: (B, …) are sharded as the batch is; scalars are whole on all devices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    size = (
        math.prod(mesh.shape[axis] for axis in BATCH) if set(BATCH) <= set(mesh.axis_names) else 1
    )
    rows = max(len(x) for x in arrays if x.ndim)
    if size == 1 or rows % size:
        return function(_visit_chunks, lambda tree: tree, *arrays)

    def ring(visit: Visit, carry: Any, block: Any) -> tuple[Any, Any]:
        following = [(i, (i + 1) % size) for i in range(size)]

        def advance(state: tuple[Any, Any], _: None) -> tuple[tuple[Any, Any], None]:
            carry, block = _visit_chunks(visit, *state)
            return (carry, jax.lax.ppermute(block, BATCH, following)), None

        # After as many steps as there are devices every block is at home again.
        return jax.lax.scan(advance, (carry, block), None, length=size)[0]

    def total(tree: Any) -> Any:
        return jax.lax.psum(tree, BATCH)

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: P(BATCH) if x.ndim else P(), tree)

    shapes = jax.eval_shape(lambda *x: function(_visit_chunks, lambda tree: tree, *x), *arrays)
    return jax.shard_map(
        lambda *x: function(ring, total, *x),
        in_specs=specs(arrays),
        out_specs=specs(shapes),
        check_vma=False,
    )(*arrays)


def exact_product(x: jax.Array, y: jax.Array) -> jax.Array:
    """(n, k) (k, m) -> (n, m) float32, exact: a sum over thousands of pairs adds up what is rounded."""
    exact = jax.lax.Precision.HIGHEST
    return jnp.matmul(x, y, precision=exact, preferred_element_type=jnp.float32)


def _visit_chunks(visit: Visit, carry: Any, block: Any) -> tuple[Any, Any]:
    """Visits a block in parts of `CHUNK` texts, where that divides it."""
    rows = len(jax.tree.leaves(block)[0])
    if rows <= CHUNK or rows % CHUNK:
        return visit(carry, block)
    parts = jax.tree.map(lambda x: x.reshape(-1, CHUNK, *x.shape[1:]), block)
    carry, parts = jax.lax.scan(visit, carry, parts)
    return carry, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
