"""Programs of JAX in float64: what remains of a difference is then one of formulas, not of rounding.

Models round to float32 in many places, whatever the type of what they get. So it is the traced program that is
changed: each operation is computed as it stands, with float64 instead of float32. Constants keep the values that they
were made with.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.extend import core

# Calls whose gradients have rules of their own, which are not asked for here.
_CALLS = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


def in_float64(function: Callable) -> Callable:
    """The same function, traced with float32 and computed with float64.

    Args:
      function: of trees of float32 and integer arrays; gives such a tree.

    Returns:
      A function of arrays of the same shapes, floating ones in float64, which gives such NumPy arrays.
    """

    @functools.cache
    def traced(structure, shapes):
        arguments = [jax.ShapeDtypeStruct(*x) for x in shapes]
        program, outputs = jax.make_jaxpr(
            lambda *leaves: function(*jax.tree.unflatten(structure, leaves)), return_shape=True
        )(*arguments)
        return jax.jit(functools.partial(_evaluate, program)), jax.tree.structure(outputs)

    def compute(*arguments):
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((np.shape(x), _type(np.asarray(x).dtype, narrow=True)) for x in leaves)
        program, outputs = traced(structure, shapes)
        with jax.enable_x64(True):
            return jax.tree.unflatten(outputs, map(np.asarray, program(*map(_wide, leaves))))

    return compute


def _evaluate(program: core.ClosedJaxpr, *inputs) -> list:
    """What a program gives of float64 instead of float32."""
    values = dict(zip(program.jaxpr.constvars, map(_wide, program.consts), strict=True))
    values |= dict(zip(program.jaxpr.invars, inputs, strict=True))

    def read(atoms: Sequence) -> list:
        return [_wide(x.val) if isinstance(x, core.Literal) else values[x] for x in atoms]

    for equation in program.jaxpr.eqns:
        name, given = equation.primitive.name, read(equation.invars)
        if name in _CALLS:
            outputs = _evaluate(equation.params[_CALLS[name]], *given)
        else:
            params = {name: _widened(x) for name, x in equation.params.items()}
            outputs = equation.primitive.bind(*given, **params)
        outputs = outputs if equation.primitive.multiple_results else [outputs]
        values |= dict(zip(equation.outvars, outputs, strict=True))
    return read(program.jaxpr.outvars)


def _widened(param):
    """A parameter of an operation: programs and types in it with float64."""
    if isinstance(param, core.ClosedJaxpr):
        shapes = [jax.ShapeDtypeStruct(x.shape, _type(x.dtype)) for x in param.in_avals]
        return jax.make_jaxpr(functools.partial(_evaluate, param))(*shapes)
    if isinstance(param, core.Jaxpr):  # of recomputation
        return _widened(core.ClosedJaxpr(param, ())).jaxpr
    if isinstance(param, tuple) and any(isinstance(x, core.ClosedJaxpr) for x in param):
        return tuple(map(_widened, param))  # branches
    if isinstance(param, np.dtype):
        return _type(param)
    return param


def _type(dtype, narrow: bool = False):
    """float64 for float32, or the other way; other types stay."""
    pair = (np.dtype(np.float64), np.dtype(np.float32))
    old, new = pair if narrow else pair[::-1]
    return new if dtype == old else dtype


def _wide(value):
    """An array as it is, in float64 if it is in float32."""
    dtype = getattr(value, "dtype", None)
    return value if dtype is None or dtype != np.float32 else np.asarray(value, np.float64)
