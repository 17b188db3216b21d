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
from vit_jax.devices.meshes import AXES, MATRICES, SIZES
from vit_jax.optim.matrices import Matrices

Stack = dict[str, jax.Array]  # arrays with an entry for each matrix


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

    def of_stack(arrays: Stack) -> Stack:
        return {"x": function(arrays["x"]).astype(dtype)}

    return _apply(of_stack, tree, {}, matrices, dtype, over_replicas=True)[0]


def apply_with_state(
    function: Callable[[Stack], Stack], tree: Any, state: dict[str, Stack], matrices: Matrices
) -> tuple[Any, dict[str, Stack]]:
    """As `apply`, with state of each matrix. Replicas, which all have it, repeat each other's products.

    Args:
      function: gets the matrices as `x` (N, m, n) float32, and the state, arrays (N, …), by name; gives
        the same.
      tree: arrays like the parameters, of which all are matrices.
      state: of each stack, by `stack_name`.
      matrices: how they are.

    Returns:
      A tree like `tree`, and the new state.
    """
    return _apply(function, tree, state, matrices, jnp.float32, over_replicas=False)


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
    counts = np.where(first < after, own, 0)
    return counts[::-1, ::-1] if from_the_end else counts


def stack_name(shape: tuple[int, int]) -> str:
    """The name of a stack of matrices of a shape, by which its state is saved."""
    return f"{MATRICES}{shape[0]}x{shape[1]}"


REPLICA = AXES[0]


def _slots(count: int, devices: int, replicas: int) -> tuple[int, int]:
    """How many matrices a device of a replica holds, and how many of them it computes with."""
    held = -(-count // devices)
    return held, -(-held // replicas)


def _apply(
    function, tree, state, matrices, dtype, *, over_replicas
) -> tuple[Any, dict[str, Stack]]:
    leaves, results, new_state = patterns.named(tree), {}, {}
    for turn, (shape, names) in enumerate(matrices.stacks().items()):
        views = [matrices.view(name, leaves[name]).astype(dtype) for name in names]
        own = {key: [array] for key, array in state.get(stack_name(shape), {}).items()}
        # Of two stacks that do not fill the devices, one lies on the first and one on the last.
        split = _scattered(
            function, {"x": views} | own, from_the_end=turn % 2 == 1, over_replicas=over_replicas
        )
        for name, part in zip(names, split.pop("x"), strict=True):
            results[name] = matrices.restore(name, part).astype(jnp.float32)
        new_state[stack_name(shape)] = {key: array for key, (array,) in split.items()}
    return patterns.map_named(lambda name, _: results[name], tree), new_state


def _scattered(
    function: Callable[[Stack], Stack],
    parts: dict[str, list[jax.Array]],
    *,
    from_the_end: bool,
    over_replicas: bool,
) -> dict[str, list[jax.Array]]:
    """`function` of the stacks of these arrays, on the mesh that is set, if one is."""
    mesh, count = jax.sharding.get_abstract_mesh(), sum(map(len, parts["x"]))
    if mesh.size == 1 or not set(AXES) <= set(mesh.axis_names):
        return _split(
            function({name: jnp.concatenate(part) for name, part in parts.items()}), parts
        )
    replicas = mesh.shape[REPLICA] if over_replicas else 1
    held, own = _slots(count, mesh.size // mesh.shape[REPLICA], replicas)
    missing = mesh.size // mesh.shape[REPLICA] * held - count
    loads = load(count, dict(mesh.shape) | {REPLICA: replicas}, from_the_end=from_the_end)

    def pad(part: list[jax.Array]) -> list[jax.Array]:
        padding = jnp.zeros((missing, *part[0].shape[1:]), part[0].dtype)
        return [padding, *part] if from_the_end else [*part, padding]

    def of_device(arrays: Stack) -> Stack:
        replica = jax.lax.axis_index(REPLICA) if over_replicas else 0
        turn = replicas - 1 - replica if from_the_end else replica
        # The last turn begins early, where all of its matrices are there.
        start = jnp.minimum(turn * own, held - own)
        mine = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, own), arrays)
        if loads.all():
            mine = function(mine)
        else:
            busy = jnp.asarray(loads > 0)[replica, jax.lax.axis_index(SIZES)]
            mine = jax.lax.cond(busy, function, lambda x: x, mine)
        if replicas == 1:
            return mine
        # Replicas have few matrices each, or none: to add them up takes less than to gather all.
        is_mine = start + jnp.arange(own) >= turn * own

        def put_together(x: jax.Array, new: jax.Array) -> jax.Array:
            new = jnp.where(is_mine.reshape(-1, *[1] * (x.ndim - 1)), new, 0)
            placed = jax.lax.dynamic_update_slice_in_dim(jnp.zeros_like(x), new, start, 0)
            return jax.lax.psum(placed, REPLICA)

        return jax.tree.map(put_together, arrays, mine)

    padded = {name: pad(part) for name, part in parts.items()}
    stacks = {name: _constrained(jnp.concatenate(part)) for name, part in padded.items()}
    stacks = jax.shard_map(of_device, in_specs=P(SIZES), out_specs=P(SIZES), check_vma=False)(
        stacks
    )
    split = _split(jax.tree.map(_constrained, stacks), padded)
    return {name: part[1:] if from_the_end else part[:-1] for name, part in split.items()}


def _constrained(stack: jax.Array) -> jax.Array:
    return jax.lax.with_sharding_constraint(stack, P(SIZES))


def _split(stacks: Stack, like: dict[str, list[jax.Array]]) -> dict[str, list[jax.Array]]:
    """The arrays that were concatenated."""
    split = {}
    for name, parts in like.items():
        ends = list(itertools.accumulate(map(len, parts)))
        split[name] = [stacks[name][end - len(x) : end] for end, x in zip(ends, parts, strict=True)]
    return split
