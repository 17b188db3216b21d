"""Which parameters are matrices to an optimizer, and which of their axes are rows and columns.

What is computed with them is in `stacks.py` and `preconditioners/`.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.optim.options import Optim

SHORTEST = 4  # a matrix has no shorter side,
MAX_ASPECT = 128  # and none that is longer than this many times the other.

# (pattern, a letter for each axis but that of the layers): axes of the batch, of the inputs (rows) and
# of the outputs (columns). The first rule that fits the name and the number of axes wins.
_RULES = (
    (r"(.*/)?qkv/kernel", "iboo"),  # (D, 3, heads, C): queries, keys and values are a matrix each
    (r"(.*/)?attention/out/kernel", "iio"),  # (heads, C, D)
    (r"(.*/)?kernel", "io"),
    (r"(.*/)?kernel", "ibo"),  # (D, 2, F): the halves of a gated layer
    (r"(.*/)?kernel", "iiio"),  # a convolution
)
_PER_HEAD = ((r"(.*/)?qkv/kernel", "ibbo"), (r"(.*/)?attention/out/kernel", "bio"))
# Beside the inputs of a network: its classifier, and what DINO compares with.
_LAST = (r"(.*/)?\w*head\w*(/\w+)?/kernel",)


@dataclasses.dataclass(frozen=True)
class Matrices:
    """The parameters that are matrices.

    Attributes:
      roles: a letter for each axis of each of them, by name: `b`atch (of matrices, the layers too),
        `i`nputs, which are the rows, and `o`utputs, the columns.
      shapes: of these parameters, by name.
    """

    roles: Mapping[str, str]
    shapes: Mapping[str, tuple[int, ...]]

    def inner_axes(self, name: str, roles: str = "io") -> tuple[int, ...]:
        """The axes of a parameter with these roles: by default those that are within a matrix."""
        return tuple(i for i, role in enumerate(self.roles[name]) if role in roles)

    def size(self, name: str) -> tuple[int, int]:
        """(inputs, outputs) of each matrix of a parameter."""
        return tuple(_product(self.shapes[name], self.inner_axes(name, role)) for role in "io")

    def stacks(self) -> dict[tuple[int, int], list[str]]:
        """The names of the parameters in each stack, by the (shorter, longer) side of its matrices."""
        by_size = {}
        for name in self.roles:
            by_size.setdefault(tuple(sorted(self.size(name))), []).append(name)
        return by_size

    def count(self, name: str) -> int:
        """How many matrices a parameter holds."""
        return _product(self.shapes[name], self.inner_axes(name, "b"))

    def norms(self, name: str, x: jax.Array) -> jax.Array:
        """The Frobenius norm of each matrix of a parameter, with axes of length 1 within it."""
        return jnp.sqrt(jnp.sum(jnp.square(x), self.inner_axes(name), keepdims=True))

    def view(self, name: str, x: jax.Array) -> jax.Array:
        """A parameter as (matrices, shorter side, longer side)."""
        order = [axis for role in "bio" for axis in self.inner_axes(name, role)]
        x = x.transpose(order).reshape(self.count(name), *self.size(name))
        return x.mT if x.shape[1] > x.shape[2] else x

    def restore(self, name: str, x: jax.Array) -> jax.Array:
        """The inverse of `view`."""
        order = [axis for role in "bio" for axis in self.inner_axes(name, role)]
        x = x.mT if self.size(name)[0] > self.size(name)[1] else x
        x = x.reshape([self.shapes[name][axis] for axis in order])
        return x.transpose(np.argsort(order))


def find(config: Optim, params: Any, inputs: Sequence[str]) -> Matrices:
    """The matrices among the parameters that are trained.

    Args:
      config: `config.optim`; `matrices` names them, otherwise they are all kernels that `SHORTEST` and
        `MAX_ASPECT` admit, except depthwise convolutions, the inputs of the network and its classifier.
      params: parameters or their shapes.
      inputs: see `classifier.ClassifierConfig.inputs`.

    Raises:
      ConfigError: there are none, or one that `matrices` names is no matrix.
    """
    shapes = {name: leaf.shape for name, leaf in patterns.named(params).items()}
    where = "config.optim.matrices"
    patterns.check_patterns(config.matrices, list(shapes), where)
    frozen = set(patterns.matching(config.freeze, shapes))
    roles = {name: _roles(config, name, shape) for name, shape in shapes.items()}
    candidates = Matrices({name: role for name, role in roles.items() if role}, shapes)
    named = set(patterns.matching(config.matrices, shapes))
    for name in sorted(named):
        if problem := _problem(candidates, name):
            raise ConfigError(
                f"{where}: {name} {shapes[name]} {problem}: change the pattern, so that the optimizer "
                f"config.optim.others={config.others} takes it"
            )
    if not config.matrices:
        ends = [f"(.*/)?({pattern})(/.*)?" for pattern in inputs]
        excluded = set(patterns.matching((*ends, *_LAST), shapes))
        named = {name for name in shapes if name not in excluded and not _problem(candidates, name)}
    if not named:
        raise ConfigError(
            f"config.optim.name={config.name!r} is for matrices, and the run trains no kernel with sides of "
            f"{SHORTEST} or more inside the model (adapters do not count): set config.optim.name=adamw, or name some "
            f"kernels in {where}"
        )
    if named <= frozen:
        raise ConfigError(
            f"config.optim.name={config.name!r} is for matrices, and config.optim.freeze freezes all of "
            f"them ({', '.join(sorted(named)[:3])}, …): set config.optim.name=adamw"
        )
    return Matrices({name: roles[name] for name in shapes if name in named - frozen}, shapes)


def _roles(config: Optim, name: str, shape: tuple[int, ...]) -> str:
    """The letter of each axis of a parameter; '' for one without rows and columns."""
    layers = "b" if patterns.is_stacked(name) else ""
    for pattern, letters in (*(_PER_HEAD if config.per_head else ()), *_RULES):
        fits = len(letters) == len(shape) - len(layers)
        if fits and re.fullmatch(pattern, name):
            return layers + letters
    return ""


def _problem(matrices: Matrices, name: str) -> str:
    """Why a parameter is not a matrix; '' if it is one."""
    if name not in matrices.roles:
        return "has no rows and columns"
    roles, shape = matrices.roles[name], matrices.shapes[name]
    if roles.endswith("iiio") and shape[-2] == 1:
        return "is a depthwise convolution"
    short, long = sorted(matrices.size(name))
    if short < SHORTEST:
        return f"has matrices with a side of {short}, below {SHORTEST}"
    if long > MAX_ASPECT * short:
        return f"has matrices of {short} x {long}, whose sides differ more than {MAX_ASPECT} times"
    return ""


def _product(shape: Sequence[int], axes: Sequence[int]) -> int:
    return int(np.prod([shape[axis] for axis in axes], dtype=int))
