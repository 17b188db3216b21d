"""Batches of images at sizes of their own, by step: how many patches an image has at most, and how many images a batch
(`config.data.native_lengths`, `native_budget`). Imported by runs that have them.

Lengths come in cycles: of the steps of a cycle each length has exactly its share, in an order that is a function of
(seed, cycle). So the number of images before a step is a closed form, whatever their number in a batch.
"""

import dataclasses
import functools

import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.order import BatchSpec

_LENGTHS = 2**32 + 1  # a key of random numbers: no view has this number
_MOST_STEPS = 1000  # of a cycle
_RULES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}


def find_lengths(data: Data) -> list[tuple[int, int]]:
    """(patches, share) of `data.native_lengths`: of how many of the steps of a cycle.

    Raises:
      ConfigError: an entry is neither a number of patches nor one with its share.
    """
    where, lengths = "config.data.native_lengths", []
    for entry in data.native_lengths or (data.native_tokens,):
        pair = tuple(entry) if isinstance(entry, tuple | list) else (entry, 1)
        if len(pair) != 2 or not all(type(x) is int and x > 0 for x in pair):
            raise ConfigError(
                f"{where}: {entry!r} is no number of patches, such as 256, nor one with its share of the steps, "
                "such as (256, 2)"
            )
        lengths.append(pair)
    if len({tokens for tokens, _ in lengths}) < len(lengths):
        raise ConfigError(f"{where} = {data.native_lengths} has a length twice: give it a share")
    if (steps := sum(share for _, share in lengths)) > _MOST_STEPS:
        raise ConfigError(
            f"{where}: the shares add up to {steps}, more than {_MOST_STEPS} steps: make them smaller"
        )
    return lengths


def batch_sizes(config: BatchSpec) -> list[int]:
    """The images in a batch of each length: `batch_size`, or as many as the budget has patches for.

    Raises:
      ConfigError: the budget is too small for a batch, or its batches cannot be split into `accumulate` parts.
    """
    data, lengths = config.data, find_lengths(config.data)
    if not data.native_budget:
        return [config.batch_size] * len(lengths)
    multiple, sizes = data.native_multiple, []
    for tokens, _ in lengths:
        size = data.native_budget // tokens // multiple * multiple
        if not size:
            raise ConfigError(
                f"config.data.native_budget = {data.native_budget:,} patches a batch are "
                f"{data.native_budget // tokens} images of {tokens} patches, fewer than "
                f"config.data.native_multiple = {multiple}: set it to {tokens * multiple:,} or more"
            )
        sizes.append(size)
    return sizes


def list_variants(config: BatchSpec) -> list[tuple[Data, int]]:
    """`config.data` as it is for the batches of each length, and the images in such a batch."""
    at_length = functools.partial(dataclasses.replace, config.data, native_lengths=())
    sizes = batch_sizes(config)
    return [
        (at_length(native_tokens=tokens), size)
        for (tokens, _), size in zip(find_lengths(config.data), sizes, strict=True)
    ]


class Cycle:
    """Which length a step has, and how many images came before it: pure functions of (seed, step).

    Attributes:
      images: of the batches of a cycle.
      steps: of a cycle.
    """

    def __init__(self, config: BatchSpec):
        self._seed, self._sizes = config.seed, np.array(batch_sizes(config))
        shares = [share for _, share in find_lengths(config.data)]
        self._slots = np.repeat(np.arange(len(shares)), shares)
        self.steps, self.images = len(self._slots), int(self._sizes[self._slots].sum())
        self._order = functools.lru_cache(8)(self._order)

    def choose(self, step: int) -> int:
        """The number of the length of a step, from 0."""
        cycle, place = divmod(step, self.steps)
        return int(self._order(cycle)[place])

    def counts(self, first: int, stop: int) -> list[int]:
        """How many of the steps `first` to `stop` - 1 have each length."""
        before, until = self._counts(first), self._counts(stop)
        return (until - before).tolist()

    def images_before(self, step: int) -> int:
        """The images of the steps 0 to `step` - 1."""
        return int(self._counts(step) @ self._sizes)

    def _counts(self, step: int) -> np.ndarray:
        cycle, place = divmod(step, self.steps)
        kinds, whole = len(self._sizes), np.bincount(self._slots, minlength=len(self._sizes))
        return cycle * whole + np.bincount(self._order(cycle)[:place], minlength=kinds)

    def _order(self, cycle: int) -> np.ndarray:
        if self.steps == 1:
            return self._slots
        words = -(-self.steps // 4)  # of four numbers each
        bits = np.random.Philox(key=self._seed + (_LENGTHS << 64), counter=cycle * words)
        return self._slots[np.argsort(bits.random_raw(self.steps), kind="stable")]


def lengths_text(config: BatchSpec) -> str:
    """The lengths, and the images in a batch of each, for people."""
    steps, sizes = Cycle(config).steps, batch_sizes(config)
    parts = [
        f"{tokens}" + (f" ({size:,} images, {share} of {steps} steps)" if len(sizes) > 1 else "")
        for (tokens, share), size in zip(find_lengths(config.data), sizes, strict=True)
    ]
    return f"images keep their aspects: up to {', '.join(parts)} patches of {config.data.native_patch} pixels"


def share_of(config: BatchSpec, images: int) -> tuple[float, float]:
    """By how much the loss and the learning rate of a batch of that many images are multiplied: the rules
    `native_loss` and `native_rate` of its share of `batch_size` images.
    """
    share = images / config.batch_size
    return share ** _RULES[config.data.native_loss], share ** _RULES[config.data.native_rate]
