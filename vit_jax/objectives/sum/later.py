"""Terms that begin after some steps, in a program that is the same before and after."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models import registry


def has_state(modules: nnx.Module | None) -> bool:
    """Whether something of it is neither trained nor constant."""
    return modules is not None and bool(registry.split(modules)[1].variables)


def run_if(condition: jax.Array, run: Callable, modules: nnx.Module | None) -> Any:
    """What `run(own)` gives, or zeros without running it, which changes no state of `own`."""
    definition, params, state = nnx.split(modules, nnx.Param, ...)

    def result(state: nnx.State) -> tuple[Any, nnx.State]:
        owner = nnx.merge(definition, params, state)
        output = run(owner)
        return output, nnx.state(owner, nnx.Not(nnx.Param))

    def zeros(state: nnx.State) -> tuple[Any, nnx.State]:
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes), state

    shapes, _ = jax.eval_shape(result, state)
    output, state = jax.lax.cond(condition, result, zeros, state)
    if modules is not None:
        nnx.update(modules, state)
    return output
