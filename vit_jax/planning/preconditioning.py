"""What an optimizer of matrices multiplies on each device: whole matrices, of which some devices may
have one more than others.
"""

import dataclasses

import jax
import jax.numpy as jnp

from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners import PRECONDITIONERS
from vit_jax.planning import flops


def plan_matrices(config: Optim, matrices: Matrices, devices: int) -> dict:
    """Matrix products of an update.

    Args:
      config: `config.optim`.
      matrices: see `Assembly.matrices`.
      devices: that stacks are sharded over.

    Returns:
      {"stacks": [{"shape", "count"}], "flops_per_device", "flops_per_device_if_equal"}: operations of
      the device that has most, and what it would be if all had the same.
    """
    plan = {"stacks": [], "flops_per_device": 0, "flops_per_device_if_equal": 0.0}
    for shape, names in sorted(matrices.stacks().items()):
        stack = dataclasses.replace(matrices, roles={name: matrices.roles[name] for name in names})
        count = sum(map(matrices.count, names))
        optimizer = PRECONDITIONERS[config.name](config, stack)
        params = {n: jax.ShapeDtypeStruct(matrices.shapes[n], jnp.float32) for n in names}
        state = jax.eval_shape(optimizer.init, params)
        total = flops.count(jax.make_jaxpr(optimizer.update)(params, state, params))
        plan["stacks"].append({"shape": list(shape), "count": count})
        plan["flops_per_device"] += total // count * -(-count // devices)
        plan["flops_per_device_if_equal"] += total / devices
    return plan
