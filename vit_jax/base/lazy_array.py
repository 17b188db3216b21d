"""Arrays of files that are read when they are used."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np


@dataclasses.dataclass(frozen=True)
class LazyArray:
    """An array that is read when used: `np.asarray(lazy)`. JAX takes it for one leaf of a tree.

    Attributes:
      shape, dtype: known without reading.
      read: returns the array; called for every use, so that nothing is kept.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray] = dataclasses.field(repr=False)

    def __array__(
        self, dtype: jax.typing.DTypeLike | None = None, copy: bool | None = None
    ) -> np.ndarray:
        array = self.read()
        return array if dtype is None else array.astype(dtype, copy=False)
