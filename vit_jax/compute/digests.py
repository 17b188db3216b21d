"""A digest of an array's bits in which order counts: one formula for devices and for the host.

Each word is mixed with its position in the array by the finaliser of MurmurHash3 (a bijection, so
that no change of one word goes unseen), and two sums of the mixed words are kept modulo 2³²: plain,
and weighted by position. Sums may be taken in any order and of any shards: those of an array are the
sums of those of its shards. Nothing is rounded, and −0, NaNs and their payloads are bits as others.
"""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from vit_jax.compute.platform import by_platform

SUMS = 3  # columns of a mark: two of the digest, and the sum of bits that earlier versions kept
DIGEST = slice(0, 2)
SUM_OF_BITS = 2
_POSITION = 0x9E3779B1  # odd, about 2³² over the golden ratio
_CHUNK = 2**20  # words that the host mixes at a time


def mark(
    x: jax.Array,
    *,
    shape: Sequence[int] | None = None,
    starts: Sequence[jax.Array | int] | None = None,
) -> jax.Array:
    """The mark of an array or of one of its shards, uint32 (SUMS,); part of a compiled program.

    Args:
      x: of any dtype of 1, 2 or 4 bytes.
      shape: of the whole array that `x` is a shard of; by default `x` is whole.
      starts: where the shard begins along each axis.
    """
    shape = x.shape if shape is None else tuple(shape)
    strides = tuple(math.prod(shape[axis + 1 :]) % 2**32 for axis in range(x.ndim))
    first = jnp.uint32(0)
    for start, stride in zip(starts or (), strides, strict=False):
        first += jnp.asarray(start).astype(jnp.uint32) * np.uint32(stride)
    return _mark(x, first, strides)


# A function of its own: arrays of equal shape are traced once, of which a state has many.
@functools.partial(jax.jit, static_argnames="strides")
def _mark(x: jax.Array, first: jax.Array, strides: tuple[int, ...]) -> jax.Array:
    """`mark` of a shard that begins at position `first`, its axes this many positions apart."""
    position = jnp.full(x.shape, first)
    for axis, stride in enumerate(strides):
        position += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride)
    mixed = _mixed(_words(x), position)
    return total((mixed, mixed * (2 * position + 1), _summed(x)))


@by_platform
def total(terms: Sequence[jax.Array]) -> jax.Array:
    """The sum of each of several uint32 arrays of one shape, modulo 2³²."""
    return jnp.stack([jnp.sum(x, dtype=jnp.uint32) for x in terms])


def host_mark(array: np.ndarray) -> np.ndarray:
    """The same of a whole array in the host's memory, without a device."""
    words = np.ascontiguousarray(array).reshape(-1)
    words = words.view(f"uint{8 * words.dtype.itemsize}")
    sums = np.zeros(SUMS, np.uint32)
    for first in range(0, words.size, _CHUNK):
        part = words[first : first + _CHUNK].astype(np.uint32)
        position = np.arange(first, first + part.size, dtype=np.uint32)
        mixed = _mixed(part, position)
        weighted = mixed * (2 * position + np.uint32(1))
        sums[DIGEST] += np.array([np.sum(s, dtype=np.uint32) for s in (mixed, weighted)])
    floats = jnp.issubdtype(array.dtype, jnp.floating)
    sums[SUM_OF_BITS] = np.sum(words if floats else array, dtype=np.uint32)
    return sums


def _mixed(words, position):
    """MurmurHash3's fmix32 (Appleby, public domain) of words and their positions; NumPy or JAX."""
    x = words ^ (position * np.uint32(_POSITION))
    x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return x ^ (x >> np.uint32(16))


def _words(x: jax.Array) -> jax.Array:
    """The bits of each element as uint32."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type(x, f"uint{8 * x.dtype.itemsize}").astype(jnp.uint32)


def _summed(x: jax.Array) -> jax.Array:
    """What earlier versions summed up: bits of floats, values of integers."""
    return _words(x) if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.uint32)
