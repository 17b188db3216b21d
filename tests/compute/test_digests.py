"""Digests of arrays: order counts, no sharding does, and the host's formula is the devices'."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from vit_jax.compute import digests

RNG = np.random.default_rng(0)
ARRAYS = [
    RNG.normal(size=(33, 7, 5)).astype(np.float32),
    RNG.normal(size=(33, 7)).astype(jnp.bfloat16),
    RNG.normal(size=9).astype(np.float16),
    RNG.integers(-9, 9, (5, 3)).astype(np.int32),
    RNG.integers(-9, 9, (5, 3)).astype(np.int8),
    np.array([True, False, True]),
    np.uint32(2**32 - 1),
    np.array([-0.0, np.nan, np.inf], np.float32),
    np.zeros((0, 3), np.float32),
]


def digest(words: np.ndarray) -> tuple[int, ...]:
    return tuple(digests.host_mark(words)[digests.DIGEST])


def test_host_and_devices_compute_the_same_marks_of_all_dtypes():
    marks = jax.jit(lambda arrays: [digests.mark(x) for x in arrays])(ARRAYS)
    for x, mark in zip(ARRAYS, marks, strict=True):
        np.testing.assert_array_equal(mark, digests.host_mark(np.asarray(x)), err_msg=str(x.dtype))


def test_the_mark_of_an_array_is_the_sum_of_those_of_its_shards():
    x = ARRAYS[0]
    shards = [
        digests.mark(jnp.asarray(x[i : i + 11, part]), shape=x.shape, starts=(i, part.start, 0))
        for i in (0, 11, 22)
        for part in (slice(0, 4), slice(4, 7))
    ]
    np.testing.assert_array_equal(sum(shards), digests.host_mark(x))


def change(words: np.ndarray, how: str) -> None:
    """Changes a uint32 array in a way that a sum of bits may not see."""
    (i, j), bit = RNG.choice(len(words), 2, replace=False), np.uint32(1 << int(RNG.integers(32)))
    if how == "the same bit of two elements":
        words[[i, j]] ^= bit
    elif how == "two elements exchanged":
        words[[i, j]] = words[[j, i]]
    elif how == "the order reversed":
        words[:] = words[::-1].copy()
    elif how == "the sign of two elements":
        words[[i, j]] ^= np.uint32(2**31)
    elif how == "moved by one place":
        words[:] = np.roll(words, 1)
    elif how == "transposed":
        words[:] = words.reshape(16, 16).T.reshape(-1)


@pytest.mark.parametrize(
    "how",
    [
        "the same bit of two elements", "two elements exchanged", "the order reversed",
        "the sign of two elements", "moved by one place", "transposed",
    ],
)  # fmt: skip
def test_what_a_sum_of_bits_misses_is_seen(how):
    missed_by_sum = 0
    for _ in range(200):
        words = RNG.normal(size=256).astype(np.float32).view(np.uint32)
        other = words.copy()
        change(other, how)
        assert digest(words) != digest(other)
        sums = [digests.host_mark(x.view(np.float32))[digests.SUM_OF_BITS] for x in (words, other)]
        missed_by_sum += sums[0] == sums[1]
    assert missed_by_sum > 50


def test_any_change_of_one_word_is_seen_by_the_first_sum_alone():
    words = RNG.integers(0, 2**32, 64, np.uint32)
    before = digest(words)[0]
    for i in range(64):
        for bit in range(32):
            words[i] ^= np.uint32(1 << bit)
            assert digest(words)[0] != before
            words[i] ^= np.uint32(1 << bit)
