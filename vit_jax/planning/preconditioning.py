"""What an optimizer of matrices multiplies on each device: whole matrices, of which some devices may
have one more than others.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from vit_jax.base import patterns
from vit_jax.compute import flops
from vit_jax.devices.meshes import MATRICES
from vit_jax.optim import stacks
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners import PRECONDITIONERS


def plan_matrices(config: Optim, matrices: Matrices, sizes: Mapping[str, int]) -> dict:
    """Matrix products of an update.

    Args:
      config: `config.optim`.
      matrices: see `Assembly.matrices`.
      sizes: of the mesh's axes.

    Returns:
      {"stacks": [{"shape", "count"}], "flops_per_device", "flops_per_device_if_equal"}: operations of
      the device that has most, and what it would be if all had the same.
    """
    rows, each, total = [], 0, 0
    for turn, (shape, names) in enumerate(matrices.stacks().items()):
        stack = dataclasses.replace(matrices, roles={name: matrices.roles[name] for name in names})
        count = sum(map(matrices.count, names))
        optimizer = PRECONDITIONERS[config.name](config, stack)
        params = {n: jax.ShapeDtypeStruct(matrices.shapes[n], jnp.float32) for n in names}
        state = jax.eval_shape(optimizer.init, params)
        operations = flops.count(jax.make_jaxpr(optimizer.update)(params, state, params))
        # What has state in stacks is repeated by each replica, see `stacks.apply_with_state`.
        split = sizes if not _has_stacks(state) else dict(sizes) | {stacks.REPLICA: 1}
        load = stacks.load(count, split, from_the_end=turn % 2 == 1)
        each = each + load * (operations // count)
        total += operations
        rows.append({"shape": list(shape), "count": count})
    return {
        "stacks": rows,
        "flops_per_device": float(each.max()),
        "flops_per_device_if_equal": total / math.prod(sizes.values()),
    }


def _has_stacks(state: Any) -> bool:
    return any(MATRICES in name for name in patterns.names(state))
