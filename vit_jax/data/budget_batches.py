"""Training batches whose number of images depends on the step, where `config.data.native_budget` is set."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from vit_jax.data.batches import TrainBatches
from vit_jax.data.native_batches import Cycle, batch_sizes
from vit_jax.data.order import BatchSpec, repeated_places
from vit_jax.data.record import Source


class BudgetBatches(TrainBatches):
    """Training batches whose number of images depends on the step."""

    def __init__(self, source: Source, config: BatchSpec, rows: Sequence[np.ndarray]):
        """Args as of `TrainBatches`, but the rows of the batches of each length."""
        self._cycle, self._sizes = Cycle(config), batch_sizes(config)
        self._rows = [np.asarray(own, np.int64) for own in rows]
        largest = dataclasses.replace(config, batch_size=max(self._sizes))
        super().__init__(source, largest, max(self._rows, key=len))
        self._all_places = [
            repeated_places(size, config.data.repeats)[own]
            for size, own in zip(self._sizes, self._rows, strict=True)
        ]

    def layout(self, step: int) -> tuple[np.ndarray, int]:
        number = self._variant(step)
        return self._rows[number], self._sizes[number]

    def _start(self, step: int) -> int:
        return self._cycle.images_before(step)

    def _places_of(self, step: int) -> np.ndarray:
        return self._all_places[self._variant(step)]
