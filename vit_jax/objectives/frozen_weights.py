"""The types in which a run keeps the weights of fixed teachers. What a teacher's network rounds before it does anything
else with it is rounded once, when it is loaded: results keep their bits, and a step has less to read and to gather.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend import core

from vit_jax.compute.jaxprs import scan_counts
from vit_jax.models import registry
from vit_jax.models.classifier import ClassifierConfig
from vit_jax.models.registry import Weights

# Equations that call a program with their own inputs, and those that only move the values of their first input.
_CALLS = {
    "checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "pjit", "remat2", "shard_map",
}  # fmt: skip
_MOVES = {
    "broadcast_in_dim", "copy", "dynamic_slice", "expand_dims", "reshape", "sharding_constraint", "slice", "squeeze",
    "transpose",
}  # fmt: skip


def stored(config: ClassifierConfig) -> Weights:
    """Shapes and dtypes of a fixed teacher's weights on the devices that are traced for.

    Args:
      config: the teacher's, with the dtype that it computes in there.
    """
    weights = registry.abstract_weights(config)[1]
    if jnp.dtype(config.dtype) == jnp.float32:
        return weights
    leaves, tree = jax.tree.flatten(weights)
    exact = _exact(config, jax.sharding.get_abstract_mesh())
    types = (x.dtype if kept else config.dtype for x, kept in zip(leaves, exact, strict=True))
    return jax.tree.unflatten(tree, map(jax.ShapeDtypeStruct, (x.shape for x in leaves), types))


@functools.lru_cache(maxsize=16)  # Tracing takes a second, and a run asks some three times.
def _exact(config: ClassifierConfig, mesh: jax.sharding.AbstractMesh) -> list[bool]:
    """Of each array of a model, whether its network uses it as it is, before it is rounded."""
    definition, weights = registry.abstract_weights(config)
    # As many as devices: kernels that each has its part of take no fewer.
    shape = (max(mesh.size, 1), *config.height_width, config.channels)
    images = jax.ShapeDtypeStruct(shape, config.dtype)
    forward = lambda weights, images: nnx.merge(definition, *weights)(images)  # noqa: E731
    program = jax.make_jaxpr(forward)(weights, images)
    count = len(jax.tree.leaves(weights))
    return _exact_inputs(program.jaxpr, jnp.dtype(config.dtype))[:count]


def _exact_inputs(
    program: core.Jaxpr, dtype: jnp.dtype, outputs: Sequence[bool] | None = None
) -> list[bool]:
    """Of each input of a program, whether it is used before it is rounded to `dtype`.

    Args:
      outputs: of each output, whether it is used so; by default all are.
    """
    outputs = [True] * len(program.outvars) if outputs is None else outputs
    used = {id(x) for x, exact in zip(program.outvars, outputs, strict=True) if exact}
    for equation in reversed(program.eqns):
        after = [id(x) in used for x in equation.outvars]
        before = _exact_operands(equation, dtype, after)
        used |= {id(x) for x, exact in zip(equation.invars, before, strict=True) if exact}
    return [id(x) in used for x in program.invars]


def _exact_operands(
    equation: core.JaxprEqn, dtype: jnp.dtype, outputs: Sequence[bool]
) -> list[bool]:
    """As `_exact_inputs`, of an equation's inputs."""
    name, params = equation.primitive.name, equation.params
    if name == "convert_element_type" and params["new_dtype"] == dtype:
        return [False]
    if name in _MOVES:
        return [outputs[0]] + [True] * (len(equation.invars) - 1)
    if name in _CALLS:
        program = params.get("jaxpr", params.get("call_jaxpr"))
        return _exact_inputs(getattr(program, "jaxpr", program), dtype, outputs)
    if name == "scan":
        exact = _exact_inputs(params["jaxpr"].jaxpr, dtype)
        constants, carried = scan_counts(equation)
        exact[constants : constants + carried] = [True] * carried
        return exact
    return [True] * len(equation.invars)
