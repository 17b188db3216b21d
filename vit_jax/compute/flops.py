"""Counts the operations of a program before it is compiled: matrix products and convolutions only,
loops by their length, which XLA's own count leaves out.
"""

import math
import operator
from collections.abc import Iterator

import jax
from jax.extend import core

from vit_jax.compute import conditionals
from vit_jax.compute.jaxprs import scan_counts


def count(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Operations of one run on all devices together, a multiply-add counted as 2; what is
    recomputed counts again, and branches as often as `compute.conditionals` says.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def equations(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """Every equation of a program and of those that it calls."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield equation
        for inner in _inner(equation):
            yield from equations(inner)


def stacked(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Types of what the outermost loops stack up, a slice a turn."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "scan":
            _, carried = scan_counts(equation)
            for variable in equation.outvars[carried:]:
                yield variable.aval
        else:
            for inner in _inner(equation):
                yield from stacked(inner)


def _of_equation(equation: core.JaxprEqn) -> int:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
    if name == "conv_general_dilated":
        kernel = equation.invars[1].aval.shape
        taps = math.prod(kernel) // kernel[params["dimension_numbers"].rhs_spec[0]]
        # Of the values of a dilated input, only one in `dilation` is not zero.
        dilation = math.prod(params["lhs_dilation"])
        return 2 * equation.outvars[0].aval.size * taps // dilation
    if name == "cond":
        costs = [count(branch) for branch in params["branches"]]
        _, shares = conditionals.shares(f"{equation.source_info.name_stack}/{name}", costs)
        return round(sum(map(operator.mul, shares, costs)))
    return runs(equation) * sum(count(inner) for inner in _inner(equation))


def runs(equation: core.JaxprEqn) -> int:
    """How often an equation runs the programs that it calls: turns of a loop, devices that each have
    a part of the arrays, programs of a kernel's grid.
    """
    name, params = equation.primitive.name, equation.params
    if name == "scan":
        return params["length"]
    if name == "shard_map":
        return math.prod(params["mesh"].shape[axis] for axis in params["newly_manual_axes"])
    if name == "pallas_call":
        return math.prod(params["grid_mapping"].grid)
    return 1


def _inner(equation: core.JaxprEqn) -> list:
    """The programs that an equation calls."""
    return [
        value
        for param in equation.params.values()
        for value in (param if isinstance(param, (tuple, list)) else (param,))
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
    ]
