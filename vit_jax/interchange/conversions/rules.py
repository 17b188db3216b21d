"""Rules say how a format's tensors and our parameters correspond, in both directions.

Here is what all formats share: what a rule is. How rules are applied is in `translation.py`; which names
a format has for a family, its `Conversion` says. What is not trained, such as running statistics, is a
parameter here.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

Arrays = list[np.ndarray]
LAYER = "{layer"


@dataclasses.dataclass(frozen=True)
class Transform:
    """A reversible rearrangement of arrays: elements move, their bits stay. See those below.

    Attributes:
      to_ours: a format's arrays to ours.
      to_theirs: its exact inverse.
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
    if not len(cuts):
        return SAME
    return Transform(lambda xs: [np.concatenate(xs, axis)], lambda xs: np.split(xs[0], cuts, axis))


def reordered(axis: int, order: Sequence[int]) -> Transform:
    """Ours is theirs with what lies along an axis in this order."""
    back = np.argsort(order)
    return Transform(
        lambda xs: [np.take(x, order, axis) for x in xs],
        lambda xs: [np.take(x, back, axis) for x in xs],
    )


def chain(*transforms: Transform) -> Transform:
    """Several transforms as one: applied in this order from theirs to ours, and in reverse on the
    way back.
    """

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
class Constant:
    """A tensor of theirs that no model of ours needs, such as BatchNorm's `num_batches_tracked`: its
    value is kept to write the same file again.

    Attributes:
      theirs: its name.
      value: a scalar or a small array, of a new file.
      option: the option that the value follows from: a file with another value is refused. '' for
        a value that changes no result.
      rounded: whether a file may have its value rounded to bfloat16, whatever type it has it in.
    """

    theirs: str
    value: np.generic | np.ndarray
    option: str = ""
    rounded: bool = False


@dataclasses.dataclass(frozen=True)
class Rule:
    """One of our parameters and the tensors of a format that hold the same numbers.

    A rule for a parameter under `layers`, which is stacked over the depth, describes one layer:
    `transform` sees a layer's arrays. Where their names hold `{layer}` (or `{layer:02d}`), every layer
    has its own tensors; where they do not, theirs are stacked along a leading axis too.

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
