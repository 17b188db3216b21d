"""Counts the operations of a program before it is compiled: matrix products and convolutions only,
loops by their length, which XLA's own count leaves out.
"""

import math
from collections.abc import Iterator

import jax
from jax.extend import core


def count(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> int:
    """Operations of one run on all devices together, a multiply-add counted as 2; what is
    recomputed counts again.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def stacked(jaxpr: core.ClosedJaxpr | core.Jaxpr) -> Iterator[jax.core.ShapedArray]:
    """Types of what the outermost loops stack up, a slice a turn."""
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if equation.primitive.name == "scan":
            for variable in equation.outvars[equation.params["num_carry"] :]:
                yield variable.aval
        else:
            for one in _inner(equation):
                yield from stacked(one)


def _of_equation(equation) -> int:
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
        return max(count(branch) for branch in params["branches"])
    times = params["length"] if name == "scan" else 1
    return times * sum(count(one) for one in _inner(equation))


def _inner(equation) -> list:
    """The programs that an equation calls."""
    return [
        value
        for param in equation.params.values()
        for value in (param if isinstance(param, (tuple, list)) else (param,))
        if isinstance(value, (core.Jaxpr, core.ClosedJaxpr))
    ]
