"""Which example comes where in training, and what is random about it: pure functions of (seed,
position), which need no state and no memory of the data set's size.

Training covers an endless line of positions, `batch_size` of them a step; every run through the
data set is another permutation. With repeated augmentation, a batch has several crops of an
example, and a run through the data set takes as many times more steps. With balanced sampling, an
epoch is as long, but has every class equally often.
"""

import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from vit_jax.data import crops
from vit_jax.data.options import Augment, Data, Pseudo

_ROUNDS = 8


class EvalBatchSize(Protocol):
    """The part of `config.eval` that batches depend on."""

    @property
    def batch_size(self) -> int: ...


class BatchSpec(Protocol):
    """All that batches depend on besides their source, and the step or its number. A run's config
    has it.
    """

    @property
    def seed(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def duration(self) -> str: ...
    @property
    def data(self) -> Data: ...
    @property
    def augment(self) -> Augment: ...
    @property
    def pseudo(self) -> Pseudo: ...
    @property
    def eval(self) -> EvalBatchSize: ...


def batch_indices(
    seed: int, step: int, batch_size: int, num_examples: int, repeats: int = 1
) -> np.ndarray:
    """The examples of a training step, (batch_size,) int64."""
    places = step * batch_size + repeated_places(batch_size, repeats)
    return example_ids(seed, places // repeats, num_examples)


def repeated_places(batch_size: int, repeats: int) -> np.ndarray:
    """Where the rows of a batch are in a line that has every example `repeats` times running:
    (batch_size,) int64, a permutation.

    Repeated augmentation (arXiv:1902.05509) as DeiT does it deals the copies of an example to
    different devices. Here they are a share 1 / `repeats` of the batch apart, and each share is
    rotated by two more than the previous one: so that copies are not mixed with each other by mixup,
    and are in different groups of RandAugment. Where `repeats` does not divide the batch, the last
    example continues in the next. DeiT begins another permutation when as many images were seen as
    the set has, which leaves out most examples of the last; here every example comes as often.
    """
    shares = [np.roll(np.arange(copy, batch_size, repeats), -2 * copy) for copy in range(repeats)]
    return np.concatenate(shares)


def data_step(step: int, skipped: Sequence[tuple[int, int]]) -> int:
    """Which step's data a step trains on when some data are skipped.

    Args:
      skipped: (first, count) of steps whose data are not used, none of them twice.
    """
    for first, count in sorted(skipped):
        if step >= first:
            step += count
    return step


def example_ids(seed: int, positions: np.ndarray, num_examples: int) -> np.ndarray:
    """The examples at `positions` of the line, (n,) int64: every `num_examples` of them are a
    permutation of all.
    """
    epochs, offsets = np.divmod(positions, num_examples)
    ids = np.empty(len(positions), np.int64)
    for epoch in np.unique(epochs).tolist():
        now = epochs == epoch
        ids[now] = permuted(offsets[now], num_examples, (seed, epoch))
    return ids


def permuted(numbers: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Where `numbers` (n,) in [0, size) go in a pseudo-random permutation of [0, size), (n,) int64.

    A keyed bijection, so that nothing has to be shuffled or kept: a Feistel network on the pairs
    (left, right) of numbers below about sqrt(size), walked on from where it leads outside (Black and
    Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, §5 and §4).
    """
    width = math.isqrt(size - 1) + 1
    height = -(-size // width)
    keys = np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)
    ids = np.asarray(numbers, np.uint64)
    outside = np.ones(len(ids), bool)
    while outside.any():
        left, right = np.divmod(ids[outside], np.uint64(height))
        for first, second in zip(keys[::2], keys[1::2], strict=True):
            left = (left + _mix(right ^ first)) % np.uint64(width)
            right = (right + _mix(left ^ second)) % np.uint64(height)
        ids[outside] = left * np.uint64(height) + right
        outside = ids >= size
    return ids.astype(np.int64)


def _mix(x: np.ndarray) -> np.ndarray:
    """A number below 2**32 for each of `x` (n,) uint64, every bit of which depends on all of its
    bits: the finalizer of SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014, §5).
    """
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(32)


def crop_draws(seed: int, positions: np.ndarray, view: int = 0) -> np.ndarray:
    """The random numbers in [0, 1) that decide the crops at rising `positions`, (n, crops.DRAWS), of a
    view's number.

    Philox is a function of (key, counter); a position has a stretch of the counter to itself, a view
    a key.
    """
    runs = np.split(positions, np.flatnonzero(np.diff(positions) != 1) + 1)
    draws = [
        np.random.Philox(
            key=seed + (view << 64), counter=int(run[0]) * (crops.DRAWS // 4)
        ).random_raw(len(run) * crops.DRAWS)
        for run in runs
    ]
    mantissas = np.concatenate(draws) >> np.uint64(11)  # the 53 bits that a float64 holds
    uniform = mantissas * 2.0**-53
    return uniform.reshape(-1, crops.DRAWS)
