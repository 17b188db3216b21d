"""Applies rules: a file's tensors to our parameters and back, with the proof that every tensor of a file and
every parameter of a model is accounted for. What a rule is, `rules.py` says.
"""

import concurrent.futures
import functools
import itertools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import CheckpointError, lines
from vit_jax.base.lazy_array import LazyArray
from vit_jax.interchange.conversions.rules import Constant, Rule

_CACHED, _ROWS = 2**16, 64  # of `_copy`: elements that need no care, and rows at a time
_LARGE = 2**20  # bytes
_THREADS = min(8, os.cpu_count() or 1)


def specs(
    rules: Iterable[Rule | Constant],
    like: dict,
    *,
    dtypes: Mapping[str, Any] | None = None,
    constants: Mapping[str, int | float | list | None] | None = None,
) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
    """Shape and type of all that `to_theirs` gives, in its order; arguments as there, except that
    `like` needs only shapes and dtypes.

    Raises:
      CheckpointError: the format has no place for a parameter; all of them are named.
    """
    rules = tuple(rules)
    by_name, leaves = _by_name(rules), patterns.named(like)
    _check_places(by_name, leaves)
    wanted = _wanted({name: by_name[name] for name in leaves}, leaves)
    tensor_specs = {
        n: (shape, np.dtype((dtypes or {}).get(n, d))) for n, (shape, d) in wanted.items()
    }
    fixed = _constants(rules, constants, dtypes or {})
    return tensor_specs | {n: (x.shape, x.dtype) for n, x in fixed.items()}


def planned(
    rules: Iterable[Rule | Constant],
    like: dict,
    *,
    dtypes: Mapping[str, Any] | None = None,
    constants: Mapping[str, int | float | list | None] | None = None,
) -> dict[str, LazyArray]:
    """All that `to_theirs` gives, by name, without the values of parameters; arguments as of `specs`."""
    rules = tuple(rules)
    tensors = {
        name: LazyArray(shape, dtype, _unknown)
        for name, (shape, dtype) in specs(rules, like, dtypes=dtypes, constants=constants).items()
    }
    for name, value in _constants(rules, constants, dtypes or {}).items():
        tensors[name] = LazyArray(value.shape, value.dtype, functools.partial(np.asarray, value))
    return tensors


def _unknown() -> np.ndarray:
    raise AssertionError("the values of a parameter are not planned")


def _check_places(by_name: Mapping[str, Rule], leaves: Mapping[str, Any]) -> None:
    unmapped = [
        f"{name} {tuple(leaf.shape)}" for name, leaf in leaves.items() if name not in by_name
    ]
    if unmapped:
        raise CheckpointError(
            "the format has no place for these parameters:\n  " + "\n  ".join(unmapped)
        )


def constants(
    rules: Iterable[Rule | Constant], tensors: Mapping[str, Any], *, source: Any
) -> dict[str, int | float | list | None]:
    """The values of a format's constants in a file, those that it has: a list, a number that is all of its values,
    or `None` where it has the value of a new file.

    Args:
      source: the file, for messages.

    Raises:
      CheckpointError: a value follows from an option, and the model's gives another.
    """
    known = [rule for rule in rules if isinstance(rule, Constant) and rule.theirs in tensors]
    values = {}
    for rule in known:
        value = np.asarray(tensors[rule.theirs])
        if rule.option and not _is_value_of(rule, value):
            raise CheckpointError(
                f"{source}: {rule.theirs} is {value.tolist()}, but the model's {rule.option} gives "
                f"{np.asarray(rule.value).tolist()}: set {rule.option} to what this file was trained with"
            )
        values[rule.theirs] = _shortest(value, np.asarray(rule.value))
    return values


def _shortest(value: np.ndarray, new: np.ndarray) -> int | float | list | None:
    """A constant's value as `constants` gives it: nothing for that of a new file, one number for all of its values; the
    bits stay.
    """
    if value.shape == new.shape and value.tobytes() == new.astype(value.dtype).tobytes():
        return None
    first = value.reshape(-1)[:1]
    uniform = value.ndim and value.tobytes() == np.broadcast_to(first, value.shape).tobytes()
    return first.tolist()[0] if uniform else value.tolist()


def _is_value_of(rule: Constant, stored: np.ndarray) -> bool:
    """Whether a file has the value that follows from the model's options."""
    expected = np.asarray(rule.value)
    if _nearly_equal(stored, expected):
        return True
    short = jax.numpy.bfloat16
    is_short = rule.rounded and np.array_equal(stored.astype(short).astype(stored.dtype), stored)
    return bool(is_short and _nearly_equal(stored.astype(short), expected))


def _nearly_equal(stored: np.ndarray, expected: np.ndarray) -> bool:
    """Whether values are equal but for the rounding of the type that a file has them in."""
    whole = np.issubdtype(stored.dtype, np.integer)
    tolerance = 0 if whole else 4 * float(jax.numpy.finfo(stored.dtype).eps)
    return np.allclose(stored.astype(np.float64), expected, rtol=tolerance, atol=0)


def to_ours(
    rules: Iterable[Rule | Constant], tensors: Mapping[str, Any], like: dict, *, source: Any
) -> dict:
    """Our parameters from a file's tensors.

    Args:
      rules: of the format. Those for parameters that `like` does not have are passed over.
      tensors: name to an array or what `np.asarray` makes one, with `shape` and `dtype` known
        before: see `LazyArray`.
      like: shapes and dtypes of our parameters, from `registry.abstract`.
      source: the file, for messages.

    Returns:
      A tree like `like` whose leaves are `LazyArray`: what is used one at a time is held in memory one
        at a time.

    Raises:
      CheckpointError: a tensor is left over, missing, of another shape or of a type that ours cannot
        hold exactly, or the format has no place for a parameter. The first hundred are named.
    """
    rules = tuple(rules)
    by_name, leaves = _by_name(rules), patterns.named(like)
    wanted = _wanted(by_name, leaves)
    fixed = {r.theirs: np.shape(r.value) for r in rules if isinstance(r, Constant)}
    problems = [
        f"{name} {leaf.shape}: the format has no such tensor"
        for name, leaf in leaves.items()
        if name not in by_name
    ]
    problems += [
        f"{name} {shape}: missing in the file"
        for name, (shape, _) in wanted.items()
        if name not in tensors
    ]
    for name, tensor in tensors.items():
        shape, dtype = wanted.get(name, (fixed.get(name), None))
        if shape is None:
            problems.append(f"{name} {tuple(tensor.shape)}: in the file, but not in the model")
        elif tuple(tensor.shape) != shape:
            problems.append(f"{name}: {tuple(tensor.shape)} in the file, {shape} in the model")
        elif dtype is not None and not _exact(tensor.dtype, dtype):
            problems.append(f"{name}: of type {tensor.dtype}, which {dtype} cannot hold exactly")
    if problems:
        left = any(name not in wanted and name not in fixed for name in tensors)
        cure = (
            f"\nTo read it without some of its tensors, say {source}#ignore=PATTERN, of their names"
        )
        raise CheckpointError(f"{source} does not fit the model:{lines(problems)}{cure * left}")

    def lazy(name: str, leaf) -> LazyArray:
        return LazyArray(
            tuple(leaf.shape), np.dtype(leaf.dtype), lambda: _merge(by_name[name], tensors, leaf)
        )

    return patterns.map_named(lazy, like)


def to_theirs(
    rules: Iterable[Rule | Constant],
    params: dict,
    *,
    dtypes: Mapping[str, Any] | None = None,
    constants: Mapping[str, int | float | list | None] | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """A format's tensors from our parameters: only one of these is in memory beside `params`.

    Args:
      rules: of the format. Those for parameters that `params` does not have are passed over.
      params: nested dict of arrays, `LazyArray` or not.
      dtypes: by their names, of the tensors that are written in another type than they have here.
      constants: their values in the file that is being written again; by default those of a new
        file.

    Raises:
      CheckpointError: the format has no place for a parameter; all of them are named. Raised before
        the first tensor.
    """
    rules = tuple(rules)
    by_name, leaves = _by_name(rules), patterns.named(params)
    _check_places(by_name, leaves)
    fixed = _constants(rules, constants, dtypes or {})
    return itertools.chain(_stream(by_name, leaves, dtypes or {}), fixed.items())


def edited(
    rule: Rule, leaf: Any, edits: Mapping[str, Sequence[Callable[[np.ndarray], np.ndarray]]]
) -> LazyArray:
    """A parameter after its tensors were changed as a format has them.

    Args:
      rule: of the parameter.
      leaf: an array, `LazyArray` or not.
      edits: what is done to a tensor, by its name, one after the other; shapes stay.
    """

    def change(array: np.ndarray, names: Sequence[str]) -> np.ndarray:
        theirs = rule.transform.to_theirs([array])
        for number, name in enumerate(names):
            for edit in edits.get(name, ()):
                theirs[number] = edit(theirs[number])
        return rule.transform.to_ours(theirs)[0]

    def read() -> np.ndarray:
        array = np.asarray(leaf)
        if not (patterns.is_stacked(rule.ours) and rule.by_layer):
            return change(array, rule.names)
        return np.stack([change(x, rule.names_of(layer)) for layer, x in enumerate(array)])

    return LazyArray(tuple(leaf.shape), np.dtype(leaf.dtype), read)


def _stream(rules: dict[str, Rule], leaves: dict[str, Any], dtypes: Mapping[str, Any]):
    for name, leaf in leaves.items():
        for their_name, array in _split(rules[name], np.asarray(leaf)):
            # Contiguous in its own order: a transposed view would be written with its axes swapped.
            dtype = dtypes.get(their_name, array.dtype)
            yield their_name, np.ascontiguousarray(array, dtype).reshape(array.shape)


def _split(rule: Rule, array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Their tensors of one parameter."""
    if not patterns.is_stacked(rule.ours):
        yield from zip(rule.names, rule.transform.to_theirs([array]), strict=True)
        return
    layers = (rule.transform.to_theirs([x]) for x in array)
    if rule.by_layer:
        for i, theirs in enumerate(layers):
            yield from zip(rule.names_of(i), theirs, strict=True)
    else:
        yield from zip(rule.names, map(np.stack, zip(*layers, strict=True)), strict=True)


def _merge(rule: Rule, tensors: Mapping[str, Any], leaf) -> np.ndarray:
    """One parameter from their tensors."""
    out = _empty(leaf.shape, np.dtype(leaf.dtype))
    if not patterns.is_stacked(rule.ours):
        (array,) = rule.transform.to_ours([np.asarray(tensors[name]) for name in rule.names])
        _copy(array, out.reshape(array.shape))
        return out
    whole = None if rule.by_layer else [np.asarray(tensors[name]) for name in rule.names]

    def fill(layer: int) -> None:
        names = rule.names_of(layer) if whole is None else ()
        theirs = [np.asarray(tensors[name]) for name in names] or [x[layer] for x in whole]
        (array,) = rule.transform.to_ours(theirs)
        _copy(array, out[layer].reshape(array.shape))

    # NumPy lets other threads run while it copies; each holds the tensors of one layer.
    with concurrent.futures.ThreadPoolExecutor(_THREADS) as threads:
        for done in [threads.submit(fill, layer) for layer in range(len(out))]:
            done.result()
    return out


def _empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """Memory for an array. A large one gets pages of its own, which JAX's CPU takes as they are, without
    a copy. NumPy would ask for huge ones, and a virtual machine may take seconds to find those.
    """
    size = math.prod(shape) * dtype.itemsize
    if size < _LARGE:
        return np.empty(shape, dtype)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(memory, dtype).reshape(shape)


def _copy(array: np.ndarray, out: np.ndarray) -> None:
    """`out[...] = array`. Where axes are exchanged, in parts that fit into the processor's cache: NumPy
    alone takes five times as long.
    """
    if array.size <= _CACHED:
        out[...] = array
        return
    long = [axis for axis in range(array.ndim) if array.shape[axis] > 1]
    long.sort(key=lambda axis: array.strides[axis])
    near = long[0]  # the axis along which neighbours lie side by side in theirs
    rows = array.size // array.shape[near]
    if near == array.ndim - 1 or rows <= _ROWS:
        out[...] = array
        return
    axis = long[-1]
    size = max(1, _ROWS * array.shape[axis] // rows)
    for begin in range(0, array.shape[axis], size):
        part = (slice(None),) * axis + (slice(begin, begin + size),)
        _copy(array[part], out[part])


def _by_name(rules: Iterable[Rule | Constant]) -> dict[str, Rule]:
    return {rule.ours: rule for rule in rules if isinstance(rule, Rule)}


def _wanted(rules: dict[str, Rule], leaves: dict[str, Any]) -> dict[str, tuple]:
    """The shape of every tensor that the format has for these parameters, and the type of the
    parameter.
    """
    wanted = {}
    for name, rule in rules.items():
        if name in leaves:
            dtype = np.dtype(leaves[name].dtype)
            wanted |= {n: (shape, dtype) for n, shape in _shapes(rule, tuple(leaves[name].shape))}
    return wanted


def _shapes(rule: Rule, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The shapes of what `_split` gives, without the work: of a stack one layer is rearranged, all of whose elements
    are one byte.
    """
    stacked_over = shape[:1] if patterns.is_stacked(rule.ours) else ()
    array = np.broadcast_to(np.int8(0), shape[len(stacked_over) :])
    shapes = [x.shape for x in rule.transform.to_theirs([array])]
    if not stacked_over:
        yield from zip(rule.names, shapes, strict=True)
    elif rule.by_layer:
        for layer in range(*stacked_over):
            yield from zip(rule.names_of(layer), shapes, strict=True)
    else:
        yield from (
            (n, stacked_over + layer_shape)
            for n, layer_shape in zip(rule.names, shapes, strict=True)
        )


def _constants(
    rules: Iterable[Rule | Constant],
    constants: Mapping[str, int | float | list | None] | None,
    dtypes: Mapping[str, Any],
) -> dict[str, np.ndarray]:
    """The constants of a file, with the values and types that they had in it, or else a new file's."""
    new = {rule.theirs: np.asarray(rule.value) for rule in rules if isinstance(rule, Constant)}
    if constants is None:
        return new
    values = {
        n: x if constants[n] is None else constants[n] for n, x in new.items() if n in constants
    }
    return {
        n: np.full(new[n].shape, np.asarray(value, dtypes.get(n, new[n].dtype)))
        for n, value in values.items()
    }


def _exact(theirs, ours: np.dtype) -> bool:
    """Whether our type holds all values of theirs. NumPy knows no promotion of bfloat16."""
    theirs = np.dtype(theirs)
    if theirs.name == "bfloat16":
        return ours == np.float32
    return theirs.kind == ours.kind and np.can_cast(theirs, ours, "safe")
