"""Balanced sampling, `config.data.sampling`: every class equally often in an epoch, every example of a class over
epochs.
"""

import numpy as np

from vit_jax.base.errors import ConfigError
from vit_jax.data.labels.masks import mask_table
from vit_jax.data.options import Data
from vit_jax.data.order import example_ids, permuted
from vit_jax.data.record import Labels, Source

_CIRCLES = 2**32 - 1  # no epoch, and no seed: a key of its own


class Balanced:
    """The examples at positions of the line, classes equally often.

    Of the N examples, n_k belong to class k of the K classes that occur. An epoch has N positions;
    class k has c_k of them, N / K rounded up or down so that they add up to N. The examples of a
    class stand in a circle in an order that the seed shuffles once. Every epoch takes the next c_k
    of the circle, so that over epochs all examples of a class come equally often; where they come
    within the epoch, the epoch's permutation of N decides, as in uniform sampling.
    """

    def __init__(self, seed: int, labels: np.ndarray):
        size = len(labels)
        _, labels, counts = np.unique(labels, return_inverse=True, return_counts=True)
        shuffled = permuted(np.arange(size), size, (seed, _CIRCLES))
        self._seed, self._counts = seed, counts
        # The circles one after the other, and where each begins.
        self._circles = np.lexsort((shuffled, labels))
        self._begins = np.cumsum(counts) - counts
        # Numbers in an epoch: class k has those from share k to share k + 1.
        self._shares = np.arange(len(counts) + 1) * size // len(counts)

    def __call__(self, positions: np.ndarray) -> np.ndarray:
        epochs = positions // len(self._circles)
        numbers = example_ids(self._seed, positions, len(self._circles))
        classes = np.searchsorted(self._shares, numbers, side="right") - 1
        first, taken = self._shares[classes], np.diff(self._shares)[classes]
        on_circle = (epochs * taken + numbers - first) % self._counts[classes]
        return self._circles[self._begins[classes] + on_circle]


def check_balanced(source: Source, labels: Labels, config_data: Data) -> None:
    """Raises `ConfigError` unless every example has one label, which is known before it is read."""
    if isinstance(labels, np.ndarray):
        return
    if not source.classes:
        why = "these have no labels"
    elif source.multi_label:
        why = "these have several each"
    elif mask_table(source):
        why = "these are masks"
    elif config_data.name == "mixture":
        why = "a mixture's are not known: weight its sets instead"
    else:
        why = "these are in the records: store the data set again with 'vit_jax prepare'"
    raise ConfigError(
        f"config.data.sampling = 'balanced' needs the label of every example of {config_data.name!r} before "
        f"it is read, and {why}"
    )
