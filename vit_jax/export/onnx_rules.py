"""Which ONNX nodes each of JAX's primitives becomes: `RULES`."""

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
from jax.extend import core

from vit_jax.base.errors import ConfigError
from vit_jax.export.onnx_graph import Graph, Value, tensor_type


def _elementwise(kind: str) -> Callable:
    def rule(graph: Graph, equation: core.JaxprEqn, *values: Value) -> Value:
        return _pointwise(graph, kind, equation, *values)

    return rule


def _pointwise(graph: Graph, kind: str, equation: core.JaxprEqn, *values: Value, **attributes):
    """One node, whose operands ONNX broadcasts."""
    shape = _broadcast([v.shape for v in values], equation.outvars[0].aval.shape)
    return graph.node(kind, *values, shape=shape, **attributes)


def _broadcast(shapes: Sequence[tuple], whole: tuple) -> tuple:
    """The shape of what is computed of operands of these shapes, of which each side is 1 or that of `whole`."""
    sides = [[shape[axis] for shape in shapes if shape] for axis in range(len(whole))]
    return tuple(
        1 if all(_is_one(s) for s in side) else length
        for side, length in zip(sides, whole, strict=True)
    )


def _is_one(side) -> bool:
    return isinstance(side, int) and side == 1


def _identity(graph: Graph, equation: core.JaxprEqn, *values: Value) -> list[Value]:
    return list(values)


def _number(equation: core.JaxprEqn, value: float) -> np.ndarray:
    return np.asarray(value, equation.invars[0].aval.dtype)


def _integer_pow(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    power = equation.params["y"]
    if power == 2:
        return graph.node("Mul", x, x, shape=x.shape)
    return graph.node("Pow", x, _number(equation, power), shape=x.shape)


def _square(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    return graph.node("Mul", x, x, shape=x.shape)


def _is_finite(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    """Whether a number is nearer to 0 than infinity is, which NaN is not."""
    size = graph.node("Abs", x, shape=x.shape)
    return graph.node("Less", size, _number(equation, math.inf), shape=x.shape)


def _rsqrt(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    root = graph.node("Sqrt", x, shape=x.shape)
    return graph.node("Reciprocal", root, shape=x.shape)


def _select(graph: Graph, equation: core.JaxprEqn, which: Value, *cases: Value) -> Value:
    if len(cases) != 2:
        raise ConfigError("this model cannot be written as ONNX: it selects among more than two")
    shape = _broadcast(
        [which.shape, *(case.shape for case in cases)], equation.outvars[0].aval.shape
    )
    return graph.node("Where", which, cases[1], cases[0], shape=shape)


def _cast(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    return _as_type(graph, x, equation.invars[0].aval.dtype, equation.params["new_dtype"])


def _as_type(graph: Graph, x: Value, dtype: np.dtype, wanted: np.dtype) -> Value:
    """A value of a dtype as one of another."""
    if dtype == wanted:
        return x
    return graph.node("Cast", x, shape=x.shape, to=tensor_type(wanted))


def _broadcast_in_dim(graph: Graph, equation: core.JaxprEqn, x: Value, *_: Value) -> Value:
    """Axes of length 1; see `onnx_graph`."""
    shape = [1] * len(equation.params["shape"])
    for axis, place in enumerate(equation.params["broadcast_dimensions"]):
        shape[place] = x.shape[axis]
    return graph.reshaped(x, tuple(shape))


def _reshape(graph: Graph, equation: core.JaxprEqn, x: Value, *_: Value) -> Value:
    shape = equation.outvars[0].aval.shape
    return graph.reshaped(graph.full(x, equation.invars[0].aval.shape), shape)


def _transpose(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    return graph.transposed(x, equation.params["permutation"])


def _concatenate(graph: Graph, equation: core.JaxprEqn, *values: Value) -> Value:
    full = [graph.full(v, a.aval.shape) for v, a in zip(values, equation.invars, strict=True)]
    shape, axis = equation.outvars[0].aval.shape, equation.params["dimension"]
    return graph.node("Concat", *full, shape=shape, axis=axis)


def _stack(graph: Graph, equation: core.JaxprEqn, *values: Value) -> Value:
    return graph.stacked(values, equation.invars[0].aval.shape, equation.params["axis"])


def _unstack(graph: Graph, equation: core.JaxprEqn, x: Value) -> list[Value]:
    x = graph.full(x, equation.invars[0].aval.shape)
    return graph.unstacked(x, equation.params["axis"])


def _split(graph: Graph, equation: core.JaxprEqn, x: Value) -> list[Value]:
    x = graph.full(x, equation.invars[0].aval.shape)
    shapes = [v.aval.shape for v in equation.outvars]
    sizes = np.array(equation.params["sizes"], np.int64)
    return graph.nodes_of("Split", x, sizes, shapes=shapes, axis=equation.params["axis"])


def _slice(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    whole, shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    strides = equation.params["strides"] or (1,) * len(shape)
    x = graph.full(x, whole)
    axes = [a for a in range(len(shape)) if shape[a] is not whole[a] and shape[a] != whole[a]]
    if not axes:
        return x
    rows = (equation.params["start_indices"], equation.params["limit_indices"], strides)
    starts, ends, steps = (np.array([row[a] for a in axes], np.int64) for row in rows)
    return graph.node("Slice", x, starts, ends, np.array(axes, np.int64), steps, shape=shape)


def _gather(graph: Graph, equation: core.JaxprEqn, x: Value, indices: Value) -> Value:
    """One place of some axes, as in x[:, 0]; or rows of one axis, as in x[:, [2, 0]]."""
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    whole, shape = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    if indices.array is None or numbers.operand_batching_dims:
        raise ConfigError(
            "this model cannot be written as ONNX: it gathers what depends on the image"
        )
    x, axes = graph.full(x, whole), numbers.start_index_map
    if indices.array.ndim == 1:
        starts = indices.array.astype(np.int64)
        ends = starts + [sizes[axis] for axis in axes]
        between = tuple(sizes)
        x = graph.node("Slice", x, starts, ends, np.array(axes, np.int64), shape=between)
        return graph.reshaped(x, shape)
    rows = [axis for axis in range(len(whole)) if axis not in numbers.offset_dims]
    if len(axes) == 1 and tuple(numbers.collapsed_slice_dims) == tuple(axes) and axes[0] in rows:
        return graph.node(
            "Gather", x, indices.array[..., 0].astype(np.int64), shape=shape, axis=axes[0]
        )
    raise ConfigError("this model cannot be written as ONNX: it gathers along several axes")


def _pad(graph: Graph, equation: core.JaxprEqn, x: Value, value: Value) -> Value:
    config = equation.params["padding_config"]
    if any(low < 0 or high < 0 or inner for low, high, inner in config):
        raise ConfigError(
            "this model cannot be written as ONNX: it pads within, or cuts by padding"
        )
    amounts = np.array([[low, high] for low, high, _ in config], np.int64).T.ravel()
    x = graph.full(x, equation.invars[0].aval.shape)
    return graph.node("Pad", x, amounts, value, shape=equation.outvars[0].aval.shape)


def _reduce(kind: str) -> Callable:
    def rule(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
        axes = np.array(equation.params["axes"], np.int64)
        x = graph.full(x, equation.invars[0].aval.shape)
        return graph.node(kind, x, axes, shape=equation.outvars[0].aval.shape, keepdims=0)

    return rule


def _dot_general(graph: Graph, equation: core.JaxprEqn, x: Value, y: Value) -> Value:
    """MatMul of (batch, rows, inner) and (batch, inner, columns); without batch axes of any number of rows' axes
    and one matrix, which is what runs fastest.
    """
    (x_inner, y_inner), (x_batch, y_batch) = equation.params["dimension_numbers"]
    x, y = (graph.full(v, a.aval.shape) for v, a in zip((x, y), equation.invars, strict=True))
    x_type, y_type = (atom.aval.dtype for atom in equation.invars)
    of_output = equation.outvars[0].aval.dtype
    if x_type != y_type:
        x = _as_type(graph, x, x_type, of_output)
        y = _as_type(graph, y, y_type, of_output)
        x_type = of_output
    x_free, y_free = _others(x, x_inner, x_batch), _others(y, y_inner, y_batch)
    x = graph.transposed(x, [*x_batch, *x_free, *x_inner])
    y = graph.transposed(y, [*y_batch, *y_inner, *y_free])
    batch, shape = len(x_batch), equation.outvars[0].aval.shape
    x_rows, y_columns = (
        x.shape[batch : len(x.shape) - len(x_inner)],
        y.shape[batch + len(y_inner) :],
    )
    inner = math.prod(y.shape[batch : batch + len(y_inner)])
    lead = x.shape[:batch]
    columns = _product(y_columns)
    y = graph.reshaped(y, (*lead, inner, columns))
    rows = x_rows if not batch else (_product(x_rows),)
    x = graph.reshaped(x, (*lead, *rows, inner))
    product = graph.node("MatMul", x, y, shape=(*lead, *rows, columns))
    return graph.reshaped(_as_type(graph, product, x_type, of_output), shape)


def _others(x: Value, *taken: Sequence[int]) -> list[int]:
    return [axis for axis in range(len(x.shape)) if not any(axis in axes for axes in taken)]


def _product(sides: Sequence):
    return functools.reduce(lambda a, b: a * b, sides, 1)


def _convolution(graph: Graph, equation: core.JaxprEqn, x: Value, kernel: Value) -> Value:
    params = equation.params
    numbers = params["dimension_numbers"]
    if set(params["lhs_dilation"]) != {1} or params["batch_group_count"] != 1:
        raise ConfigError("this model cannot be written as ONNX: it has transposed convolutions")
    x = graph.transposed(graph.full(x, equation.invars[0].aval.shape), numbers.lhs_spec)
    kernel = graph.full(kernel, equation.invars[1].aval.shape)
    kernel = graph.transposed(kernel, numbers.rhs_spec)
    out = equation.outvars[0].aval.shape
    result = graph.node(
        "Conv", x, kernel, shape=tuple(out[axis] for axis in numbers.out_spec),
        strides=list(params["window_strides"]), dilations=list(params["rhs_dilation"]),
        group=params["feature_group_count"], pads=_pads(params["padding"]),
    )  # fmt: skip
    return graph.transposed(result, list(np.argsort(numbers.out_spec)))


def _max_pool(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    return _pool(graph, equation, x, "MaxPool")


def _pool(graph: Graph, equation: core.JaxprEqn, x: Value, kind: str, **attributes) -> Value:
    params = equation.params
    window = params["window_dimensions"]
    dilated = {*params["base_dilation"], *params["window_dilation"]} != {1}
    if dilated or len(window) != 4 or window[0] != 1 or window[3] != 1:
        raise ConfigError(
            "this model cannot be written as ONNX: it pools over other axes than 1 and 2"
        )
    x = graph.transposed(graph.full(x, equation.invars[0].aval.shape), (0, 3, 1, 2))
    out = equation.outvars[0].aval.shape
    result = graph.node(
        kind, x, shape=(out[0], out[3], out[1], out[2]), kernel_shape=list(window[1:3]),
        strides=list(params["window_strides"][1:3]), pads=_pads(params["padding"][1:3]),
        **attributes,
    )  # fmt: skip
    return graph.transposed(result, (0, 2, 3, 1))


def _mean_pool(graph: Graph, equation: core.JaxprEqn, x: Value) -> Value:
    """The sums of windows: their means, times their sizes."""
    mean = _pool(graph, equation, x, "AveragePool", count_include_pad=1)
    size = _number(equation, math.prod(equation.params["window_dimensions"]))
    return graph.node("Mul", mean, size, shape=mean.shape)


def _pads(padding: Sequence[tuple[int, int]]) -> list[int]:
    """All beginnings, then all ends."""
    return [int(amount) for side in zip(*padding, strict=True) for amount in side]


RULES: dict[str, Callable] = {
    **{name: _elementwise(kind) for name, kind in {
        "abs": "Abs", "add": "Add", "div": "Div", "erf": "Erf", "exp": "Exp", "log": "Log", "logistic": "Sigmoid",
        "max": "Max", "min": "Min", "mul": "Mul", "neg": "Neg", "sign": "Sign", "sqrt": "Sqrt", "sub": "Sub",
        "tanh": "Tanh",
    }.items()},
    **dict.fromkeys(
        ("copy", "name", "optimization_barrier", "sharding_constraint", "stop_gradient"),
        _identity,
    ),
    "broadcast_in_dim": _broadcast_in_dim,
    "concatenate": _concatenate,
    "conv_general_dilated": _convolution,
    "convert_element_type": _cast,
    "dot_general": _dot_general,
    "gather": _gather,
    "integer_pow": _integer_pow,
    "is_finite": _is_finite,
    "pad": _pad,
    "reduce_max": _reduce("ReduceMax"),
    "reduce_sum": _reduce("ReduceSum"),
    "reduce_window_max": _max_pool,
    "reduce_window_sum": _mean_pool,
    "reshape": _reshape,
    "rsqrt": _rsqrt,
    "select_n": _select,
    "slice": _slice,
    "split": _split,
    "square": _square,
    "squeeze": _reshape,
    "stack": _stack,
    "transpose": _transpose,
    "unstack": _unstack,
}  # fmt: skip
