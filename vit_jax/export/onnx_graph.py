"""A jaxpr as an ONNX graph. Which nodes a primitive becomes is in `onnx_rules.py`.

What depends on no input is computed here, so that weights are stored as they are used. Broadcasting is put off:
a value may have sides of length 1 where the jaxpr has more, as ONNX's operators broadcast by themselves; what
needs all of it asks for `full`. Loops over layers are unrolled.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import onnx
from jax.extend import core
from onnx import TensorProto, helper

from vit_jax.base.errors import ConfigError
from vit_jax.compute.jaxprs import scan_counts

OPSET = 18
_UNNAMED = ""
# Primitives that call a jaxpr, and the parameter that holds it.
_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "remat2": "jaxpr",
    "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr",
}  # fmt: skip
# Devices of a kind that has no way of its own to compute anything, see `compute.platform`: plain formulas.
_DEVICE = jax.sharding.AbstractDevice(device_kind="onnx", num_cores=None, platform="onnx")
_NEUTRAL = jax.sharding.AbstractMesh(
    (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), abstract_device=_DEVICE
)
Shape = tuple[Any, ...]  # of numbers, and multiples of the batch


@dataclasses.dataclass(frozen=True)
class Value:
    """An array while a graph is built.

    Attributes:
      shape: what it has; a side may be 1 where the jaxpr's is longer.
      array: its numbers, where they depend on no input.
      name: in the graph, where they do.
    """

    shape: Shape
    array: np.ndarray | None = None
    name: str = _UNNAMED


class Graph:
    """Nodes and constants, which rules add."""

    def __init__(self, rules: dict[str, Callable], batch: Any, store: Callable):
        """
        Args:
          rules: by primitive: `rule(graph, equation, *values) -> values`.
          batch: the size of the batch, a number or a symbol.
          store: an array of weights to the nodes that give it, see `constant`.
        """
        self._rules, self._batch, self._store = rules, batch, store
        self.nodes: list[onnx.NodeProto] = []
        self.constants: dict[str, onnx.TensorProto] = {}
        self._known: dict[tuple, str] = {}
        self._count = collections.Counter()

    def run(self, jaxpr: core.Jaxpr, consts: Sequence, values: Sequence[Value]) -> list[Value]:
        """Adds what a jaxpr computes of `values`."""
        known = dict(zip(jaxpr.constvars, map(constant, consts), strict=True))
        known |= dict(zip(jaxpr.invars, values, strict=True))

        def value_of(atom) -> Value:
            return constant(atom.val) if isinstance(atom, core.Literal) else known[atom]

        for equation in jaxpr.eqns:
            outputs = self._equation(equation, [value_of(atom) for atom in equation.invars])
            known |= dict(zip(equation.outvars, outputs, strict=True))
        return [value_of(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
        name = equation.primitive.name
        if name in _CALLS:
            inner = equation.params[_CALLS[name]]
            closed = hasattr(inner, "consts")
            return self.run(
                inner.jaxpr if closed else inner, inner.consts if closed else (), values
            )
        if name == "scan":
            return self._scan(equation, values)
        lazy = name == "broadcast_in_dim"
        if not lazy and all(v.array is not None for v in values) and _is_fixed(equation):
            arrays = [_whole(v, a.aval.shape) for v, a in zip(values, equation.invars, strict=True)]
            with jax.ensure_compile_time_eval():
                outputs = equation.primitive.bind(*arrays, **equation.params)
            return [
                constant(x) for x in (outputs if equation.primitive.multiple_results else [outputs])
            ]
        if name not in self._rules:
            raise ConfigError(
                f"this model cannot be written as ONNX: it computes {name!r}, for which there is no rule in "
                "vit_jax/export/onnx_rules.py; --to=stablehlo takes every model"
            )
        outputs = self._rules[name](self, equation, *values)
        return list(outputs) if isinstance(outputs, list | tuple) else [outputs]

    def _scan(self, equation: core.JaxprEqn, values: list[Value]) -> list[Value]:
        """A loop, unrolled."""
        params, closed = equation.params, equation.params["jaxpr"]
        fixed, carried = scan_counts(equation)
        first = fixed + carried  # of the inputs that are scanned over
        carry, sliced = values[fixed:first], []
        rows: list[list[Value]] = []
        for v, atom in zip(values[first:], equation.invars[first:], strict=True):
            sliced.append(self.unstacked(self.full(v, atom.aval.shape), 0))
        steps = range(params["length"])
        for step in reversed(steps) if params["reverse"] else steps:
            outputs = self.run(
                closed.jaxpr, closed.consts, [*values[:fixed], *carry, *(x[step] for x in sliced)]
            )
            carry = outputs[:carried]
            rows.append(outputs[carried:])
        rows = rows[::-1] if params["reverse"] else rows
        shapes = [v.aval.shape for v in closed.jaxpr.outvars[carried:]]
        columns = zip(zip(*rows, strict=True), shapes, strict=True)
        return [*carry, *(self.stacked(column, shape, 0) for column, shape in columns)]

    # What rules use.

    def node(self, kind: str, *inputs: Value | np.ndarray, shape: Shape, **attributes) -> Value:
        """The result, of this shape, of a new node."""
        return self.nodes_of(kind, *inputs, shapes=[shape], **attributes)[0]

    def nodes_of(
        self, kind: str, *inputs: Value | np.ndarray, shapes: Sequence[Shape], **attributes
    ) -> list[Value]:
        """The results of a new node that has several."""
        names = [self.name(x if isinstance(x, Value) else constant(x)) for x in inputs]
        outputs = [Value(tuple(shape), name=self._new(kind)) for shape in shapes]
        self.nodes.append(helper.make_node(kind, names, [v.name for v in outputs], **attributes))
        return outputs

    def name(self, value: Value) -> str:
        """A value's name; a constant is stored when it is first asked for."""
        if value.array is None:
            return value.name
        array = np.asarray(value.array, order="C")
        key = (array.dtype.str, array.shape, hashlib.sha256(array).digest())
        if key not in self._known:
            name = self._new("constant")
            stored, nodes = self._store(name, array)
            self.constants |= stored
            self.nodes += nodes
            self._known[key] = name
        return self._known[key]

    def full(self, value: Value, shape: Shape) -> Value:
        """A value with all sides as long as the jaxpr has them."""
        if tuple(value.shape) == tuple(shape):
            return value
        if value.array is not None and all(isinstance(side, int) for side in shape):
            return Value(tuple(shape), np.broadcast_to(value.array, shape))
        return self.node("Expand", value, self.lengths(shape), shape=shape)

    def reshaped(self, value: Value, shape: Shape) -> Value:
        """A value, `full`, with the same numbers in another shape."""
        if tuple(value.shape) == tuple(shape):
            return value
        if value.array is not None:
            return Value(tuple(shape), value.array.reshape(shape))
        sides = [side if isinstance(side, int) else -1 for side in shape]
        return self.node("Reshape", value, np.array(sides, np.int64), shape=shape)

    def transposed(self, value: Value, order: Sequence[int]) -> Value:
        """A value with its axes in another order."""
        if list(order) == list(range(len(value.shape))):
            return value
        shape = tuple(value.shape[axis] for axis in order)
        if value.array is not None:
            return Value(shape, value.array.transpose(order))
        return self.node("Transpose", value, shape=shape, perm=list(order))

    def unstacked(self, value: Value, axis: int) -> list[Value]:
        """The slices along an axis, without it."""
        shape, count = value.shape, value.shape[axis]
        rest = (*shape[:axis], *shape[axis + 1 :])
        if value.array is not None:
            return [Value(rest, np.take(value.array, i, axis)) for i in range(count)]
        return [
            self.node("Gather", value, np.int64(i), shape=rest, axis=axis) for i in range(count)
        ]

    def stacked(self, values: Sequence[Value], shape: Shape, axis: int) -> Value:
        """Values of one shape along a new axis."""
        lengthened = (*shape[:axis], 1, *shape[axis:])
        rows = [self.reshaped(self.full(v, shape), lengthened) for v in values]
        whole = (*shape[:axis], len(values), *shape[axis:])
        if all(v.array is not None for v in rows):
            return Value(whole, np.concatenate([v.array for v in rows], axis))
        return self.node("Concat", *rows, shape=whole, axis=axis)

    def lengths(self, shape: Shape) -> Value | np.ndarray:
        """A shape as a tensor of integers."""
        if all(isinstance(side, int) for side in shape):
            return np.array(shape, np.int64)
        parts = [
            np.array([side], np.int64) if isinstance(side, int) else self._multiple(side)
            for side in shape
        ]
        return self.node("Concat", *parts, shape=(len(shape),), axis=0)

    def _multiple(self, side: Any) -> Value:
        """The length of a side that is a multiple of the batch."""
        batch = self.node("Shape", Value((), name=INPUT), shape=(1,), start=0, end=1)
        return self.node("Mul", batch, np.array([int(side // self._batch)], np.int64), shape=(1,))

    def _new(self, kind: str) -> str:
        self._count[kind] += 1
        return f"{kind.lower()}_{self._count[kind]}"


INPUT = "images"


def constant(array: Any) -> Value:
    """A value that depends on no input."""
    array = np.asarray(array)
    return Value(array.shape, array)


def build(
    rules: dict[str, Callable], function: Callable, images: jax.ShapeDtypeStruct, outputs: Sequence[str],
    store: Callable,
) -> onnx.GraphProto:  # fmt: skip
    """The graph of `function(images)`, one array to one or several.

    Args:
      rules: see `Graph`.
      images: the input; its first side may be a symbol.
      outputs: what to call the results.
      store: `store(name, array)` gives constants by name, and nodes that make `name` of them.

    Raises:
      ConfigError: a primitive has no rule.
    """
    with jax.sharding.use_abstract_mesh(_NEUTRAL):
        closed = jax.make_jaxpr(function)(images)
    graph = Graph(rules, images.shape[0], store)
    results = graph.run(closed.jaxpr, closed.consts, [Value(images.shape, name=INPUT)])
    for name, result, aval in zip(outputs, results, closed.out_avals, strict=True):
        whole = graph.full(result, aval.shape)
        graph.nodes.append(helper.make_node("Identity", [graph.name(whole)], [name]))
    nodes, needed = [], set(outputs)
    for node in reversed(graph.nodes):
        if needed & set(node.output):
            nodes.append(node)
            needed |= set(node.input)
    return helper.make_graph(
        nodes[::-1],
        "vit_jax",
        [helper.make_tensor_value_info(INPUT, tensor_type(images.dtype), _sides(images.shape))],
        [
            helper.make_tensor_value_info(name, tensor_type(aval.dtype), _sides(aval.shape))
            for name, aval in zip(outputs, closed.out_avals, strict=True)
        ],
        [tensor for name, tensor in graph.constants.items() if name in needed],
    )


def tensor_type(dtype: Any) -> int:
    """ONNX's number for a dtype."""
    if str(dtype) == "bfloat16":
        return TensorProto.BFLOAT16
    return helper.np_dtype_to_tensor_dtype(np.dtype(dtype))


def _sides(shape: Shape) -> list:
    return [side if isinstance(side, int) else str(side) for side in shape]


def _is_fixed(equation: core.JaxprEqn) -> bool:
    """Whether no length is a symbol."""
    return all(isinstance(side, int) for v in equation.outvars for side in v.aval.shape)


def _whole(value: Value, shape: Shape) -> np.ndarray:
    return np.broadcast_to(value.array, shape)
