"""In how many bits weights are stored."""

from collections.abc import Collection

import numpy as np

PRECISIONS = ("float32", "bfloat16", "int8")
_LEAST = 1024  # numbers; smaller arrays stay as they are


def is_large(array: np.ndarray) -> bool:
    """Whether it is worth it to store an array in fewer bits: a matrix of floats, no bias or scale."""
    return array.ndim >= 2 and array.size >= _LEAST and array.dtype == np.float32


def rounded_to_int8(array: np.ndarray, kept: Collection[int]) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers from -127 to 127, and what they are to be multiplied with: one number for each place along the
    axes `kept`.
    """
    axes = tuple(axis for axis in range(array.ndim) if axis not in kept)
    scale = np.abs(array).max(axes, keepdims=True) / 127
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return np.rint(array / scale).astype(np.int8), scale
