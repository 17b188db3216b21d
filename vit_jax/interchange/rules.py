"""Rules say how a format's tensors and our parameters correspond, in both directions.

Here is what all formats share: what a rule is, how one is applied, and the proof that every tensor
  of a file and every
parameter of a model is accounted for. Which names a format uses is said in its own module.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from vit_jax.base import patterns
from vit_jax.checkpoints.reading import CheckpointError

Arrays = list[np.ndarray]
LAYER = "{layer"


@dataclasses.dataclass(frozen=True)
class Lazy:
    """An array that is read when used: `np.asarray(lazy)`. JAX takes it for one leaf of a tree.

    Attributes:
      shape, dtype: known without reading.
      read: returns the array; called anew for every use, so that nothing is kept.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = dataclasses.field(repr=False)

    def __array__(self, dtype=None, copy=None) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)


@dataclasses.dataclass(frozen=True)
class Transform:
    """A reversible rearrangement of arrays: elements move, their bits stay. See those below.

    Attributes:
      to_ours: a format's arrays to ours.
      to_theirs: exactly the way back.
    """

    to_ours: Callable[[Arrays], Arrays]
    to_theirs: Callable[[Arrays], Arrays]


SAME = Transform(lambda arrays: arrays, lambda arrays: arrays)


def transposed(*axes: int) -> Transform:
    """Ours is theirs with its axes in this order: (1, 0) for a PyTorch weight (outputs, inputs)."""
    back = tuple(int(axis) for axis in np.argsort(axes))
    return Transform(
        lambda xs: [x.transpose(axes) for x in xs], lambda xs: [x.transpose(back) for x in xs]
    )


def reshaped(ours: Sequence[int], theirs: Sequence[int]) -> Transform:
    """Ours has one shape, theirs the other."""
    return Transform(
        lambda xs: [x.reshape(ours) for x in xs],
        lambda xs: [x.reshape(theirs) for x in xs],
    )


def expanded(*axes: int) -> Transform:
    """Theirs has axes of length 1 in these places; ours lacks them."""
    return Transform(
        lambda xs: [np.squeeze(x, axes) for x in xs],
        lambda xs: [np.expand_dims(x, axes) for x in xs],
    )


def stacked(axis: int) -> Transform:
    """Theirs are several arrays (query, key, value), ours is one with a new axis (qkv)."""
    return Transform(
        lambda xs: [np.stack(xs, axis)],
        lambda xs: [np.take(xs[0], i, axis) for i in range(xs[0].shape[axis])],
    )


def joined(axis: int, sizes: Sequence[int]) -> Transform:
    """Theirs are several arrays of these sizes along an axis; ours is them, one after the other."""
    cuts = np.cumsum(sizes)[:-1]
    return Transform(lambda xs: [np.concatenate(xs, axis)], lambda xs: np.split(xs[0], cuts, axis))


def chain(*transforms: Transform) -> Transform:
    """From theirs to ours one transform after the other, and back in the opposite order."""

    def to_ours(arrays: Arrays) -> Arrays:
        for transform in transforms:
            arrays = transform.to_ours(arrays)
        return arrays

    def to_theirs(arrays: Arrays) -> Arrays:
        for transform in reversed(transforms):
            arrays = transform.to_theirs(arrays)
        return arrays

    return Transform(to_ours, to_theirs)


@dataclasses.dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors of a format that hold the same numbers.

    A rule for a parameter under `layers`, which is stacked over the depth, speaks of one layer:
      `transform` sees a layer's
    arrays. Where their names hold `{layer}` (or `{layer:02d}`), every layer has its own tensors;
    where they do not, theirs are
    stacked along a leading axis too.

    >>> Rule("encoder/layers/mlp/up/kernel", "blocks.{layer}.mlp.fc1.weight", transposed(1, 0))
    >>> Rule("pool/attention/qkv/bias", ("query/bias", "key/bias", "value/bias"), stacked(0))

    Attributes:
      ours: the parameter's name.
      theirs: the tensor's name, or several.
      transform: between theirs and ours.
      first_layer: the number of the first layer in their names.
    """

    ours: str
    theirs: str | tuple[str, ...]
    transform: Transform = SAME
    first_layer: int = 0

    @property
    def names(self) -> tuple[str, ...]:
        """`theirs`, always several."""
        return (self.theirs,) if isinstance(self.theirs, str) else tuple(self.theirs)

    def names_of(self, layer: int) -> list[str]:
        """Their names of one layer, counted from 0."""
        return [name.format(layer=layer + self.first_layer) for name in self.names]

    @property
    def by_layer(self) -> bool:
        """Whether every layer has tensors of its own."""
        return any(LAYER in name for name in self.names)


def shapes(rules: Iterable[Rule], like: dict) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the format has for the parameters `like`.

    Args:
      rules: those for parameters that `like` does not have are passed over.
      like: nested dict of what has `shape`.
    """
    leaves = _named(like)
    wanted = {}
    for rule in rules:
        if rule.ours in leaves:
            # One element stands for all: no memory, whatever the size.
            array = np.broadcast_to(np.float32(0), leaves[rule.ours].shape)
            wanted |= {name: x.shape for name, x in _split(rule, array)}
    return wanted


def to_ours(rules: Iterable[Rule], tensors: Mapping[str, Any], like: dict, *, source: Any) -> dict:
    """Our parameters from a file's tensors.

    Args:
      rules: of the format. Those for parameters that `like` does not have are passed over.
      tensors: name to an array or what `np.asarray` makes one, with `shape` and `dtype` known
        before: see `Lazy`.
      like: shapes and dtypes of our parameters, from `registry.abstract`.
      source: the file, for messages.

    Returns:
      A tree like `like` whose leaves are `Lazy`: what is used one at a time is held in memory one
        at a time.

    Raises:
      CheckpointError: a tensor is left over, missing or of another shape or no floating-point
        number, or the format has no
        place for a parameter. All of them are named.
    """
    rules = {rule.ours: rule for rule in rules}
    wanted = shapes(rules.values(), like)
    problems = [
        f"{name} {leaf.shape}: the format has no such tensor"
        for name, leaf in _named(like).items()
        if name not in rules
    ]
    problems += [
        f"{name} {shape}: missing in the file"
        for name, shape in wanted.items()
        if name not in tensors
    ]
    for name, tensor in tensors.items():
        if name not in wanted:
            problems.append(f"{name} {tuple(tensor.shape)}: in the file, but not in the model")
        elif tuple(tensor.shape) != wanted[name]:
            problems.append(
                f"{name}: {tuple(tensor.shape)} in the file, {wanted[name]} in the model"
            )
        elif not _exact_in_float32(tensor.dtype):
            problems.append(f"{name}: of type {tensor.dtype}, which float32 cannot hold exactly")
    if problems:
        raise CheckpointError(f"{source} does not fit the model:\n  " + "\n  ".join(problems))

    def lazy(name: str, leaf) -> Lazy:
        return Lazy(
            tuple(leaf.shape), np.dtype(leaf.dtype), lambda: _merge(rules[name], tensors, leaf)
        )

    return patterns.map_named(lazy, like)


def to_theirs(
    rules: Iterable[Rule], params: dict, *, dtypes: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, np.ndarray]]:
    """A format's tensors from our parameters: only one of these is in memory beside `params`.

    Args:
      rules: of the format. Those for parameters that `params` does not have are passed over.
      params: nested dict of arrays, `Lazy` or not.
      dtypes: of the tensors that are not to keep the type they have here, by their names.

    Raises:
      CheckpointError: the format has no place for a parameter; all of them are named. Raised before
        the first tensor.
    """
    rules = {rule.ours: rule for rule in rules}
    leaves = _named(params)
    homeless = [f"{name} {tuple(leaf.shape)}" for name, leaf in leaves.items() if name not in rules]
    if homeless:
        raise CheckpointError(
            "the format has no place for these parameters:\n  " + "\n  ".join(homeless)
        )
    return _stream(rules, leaves, dtypes or {})


def _stream(rules: dict[str, Rule], leaves: dict[str, Any], dtypes: Mapping[str, Any]):
    for name, leaf in leaves.items():
        for their_name, array in _split(rules[name], np.asarray(leaf)):
            # Contiguous in its own order: a transposed view would be written with its axes swapped.
            yield (
                their_name,
                np.ascontiguousarray(array, dtypes.get(their_name, array.dtype)).reshape(
                    array.shape
                ),
            )


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
    if not patterns.is_stacked(rule.ours):
        (array,) = rule.transform.to_ours([np.asarray(tensors[name]) for name in rule.names])
        return np.ascontiguousarray(array, leaf.dtype).reshape(leaf.shape)
    whole = None if rule.by_layer else [np.asarray(tensors[name]) for name in rule.names]
    out = np.empty(leaf.shape, leaf.dtype)
    for i in range(len(out)):
        theirs = (
            [x[i] for x in whole]
            if whole
            else [np.asarray(tensors[name]) for name in rule.names_of(i)]
        )
        (out[i],) = rule.transform.to_ours(theirs)
    return out


def _named(tree: dict) -> dict[str, Any]:
    return dict(zip(patterns.names(tree), jax.tree.leaves(tree), strict=True))


def _exact_in_float32(dtype) -> bool:
    dtype = np.dtype(dtype)
    return dtype.name in ("float32", "float16", "bfloat16")
