"""In how many bits weights are stored, and programs compute."""

from collections.abc import Collection

import numpy as np

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.models import registry

FLOAT16 = "float16"  # programs compute in it too, with norms, softmax and the head in float32
PRECISIONS = ("float32", "bfloat16", "int8", FLOAT16)
# Of a program in float16: the largest difference from float32 that rounding explains, as a share of the largest number.
FLOAT16_TOLERANCE = 0.01
_LEAST = 1024  # numbers; smaller arrays stay as they are


def check_float16(weights: registry.Weights, source: object) -> None:
    """Raises `ConfigError` for weights with numbers that float16 does not have."""
    largest = np.finfo(np.float16).max
    for name, array in patterns.named(patterns.union(*weights)).items():
        if np.abs(np.asarray(array)).max(initial=0) > largest:
            raise ConfigError(
                f"{source}: its weights {name} have numbers above {largest:.0f}, the largest of float16: set "
                "--weights=bfloat16 or float32"
            )


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
