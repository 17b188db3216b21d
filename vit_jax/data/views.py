"""The variants of a run's batches, by step: how their images are cut. Several views of an image (`config.data.views`)
are in `several_views.py`, other sizes of images in `size_schedule.py`.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from vit_jax.base import durations
from vit_jax.data import crops
from vit_jax.data.options import Data
from vit_jax.data.order import BatchSpec, data_step
from vit_jax.models.contract import split_images

if TYPE_CHECKING:
    from vit_jax.data.several_views import Views

_CHOICE = 2**32  # of random numbers: no view has this number


@dataclasses.dataclass(frozen=True)
class Variant:
    """How the images of a batch are cut; a step is compiled for the shapes of each.

    Attributes:
      data: `config.data` as it is for these batches; of `patch_sizes` it has one.
      views: of each image; () where images are cut but once.
      batch_size: images of a batch.
    """

    data: Data
    batch_size: int
    views: "tuple[Views, ...]" = ()

    @property
    def patch(self) -> int:
        """The model's patch in these steps; 0: as the model has it."""
        return self.data.patch_sizes[0] if self.data.patch_sizes else 0

    @property
    def shapes(self) -> list[tuple[str, tuple[int, ...]]]:
        """(name, shape of an example) of the images."""
        shape = crops.batch_shape(self.data)
        if self.patch:
            shape = split_images(shape, self.patch)
        return [(view.name, view.shape) for view in self.views] or [("image", shape)]


def of(config: BatchSpec) -> "tuple[Views, ...]":
    """The views of each image, see `several_views.find_views`; () where images are cut but once."""
    if not config.data.views:
        return ()
    from vit_jax.data import several_views

    return several_views.find_views(config)


def variants(config: BatchSpec) -> tuple[Variant, ...]:
    """The ways in which the run's batches are cut, of which `make_choice` gives each step one: for every entry of
    `config.data.size_schedule` or `native_lengths`; or the views as `of` has them, and with the sizes of each entry
    of `config.data.view_sizes`.

    Raises:
      ConfigError: see `of`; an entry has another number of sizes than there are views, or is no size of a schedule.
    """
    size = config.batch_size
    if config.data.patch_sizes:
        from vit_jax.data import patch_sizes

        return tuple(Variant(data, size) for data in patch_sizes.split_evenly(config.data))
    if config.data.native_tokens:
        from vit_jax.data import native_batches

        return tuple(Variant(*entry) for entry in native_batches.list_variants(config))
    if config.data.size_schedule:
        from vit_jax.data import size_schedule

        return tuple(Variant(phase.data, size) for phase in size_schedule.phases(config.data))
    usual = Variant(config.data, size, of(config))
    if not config.data.view_sizes:
        return (usual,)
    from vit_jax.data import several_views

    return usual, *(
        Variant(data, size, views) for data, views in several_views.find_sized_views(config)
    )


def make_choice(config: BatchSpec, examples: int) -> Callable[[int], int]:
    """Step, from 0, -> which of `variants` its batch is, a pure function of (seed, step).

    Args:
      examples: to train on.
    """
    if config.data.patch_sizes:
        from vit_jax.data import patch_sizes

        return patch_sizes.make_size_choice(config.data, lambda step: draw(config.seed, step)[0])
    if config.data.native_tokens:
        from vit_jax.data import native_batches

        return native_batches.Cycle(config).choose
    if not (config.data.view_sizes or config.data.size_schedule):
        return lambda step: 0
    units = {"batch_size": config.batch_size, "examples_per_epoch": examples}
    total = durations.steps(config.duration, **units)
    if config.data.size_schedule:
        from vit_jax.data import size_schedule

        return size_schedule.make_choice(config.data, total)
    from vit_jax.data import several_views

    to_steps = functools.partial(durations.steps, **units, total_steps=total)
    return several_views.make_choice(config, to_steps, lambda step: draw(config.seed, step)[0])


def images_per_step(config: BatchSpec) -> float:
    """The images of a batch, on average over a cycle of its lengths where there is a budget of patches."""
    if not config.data.native_budget:
        return config.batch_size
    from vit_jax.data import native_batches

    cycle = native_batches.Cycle(config)
    return cycle.images / cycle.steps


def images_before(config: BatchSpec, step: int, skipped: Sequence[tuple[int, int]] = ()) -> int:
    """The images of the steps 0 to `step` - 1.

    Args:
      skipped: see `order.data_step`.
    """
    if not (config.data.native_budget and step):
        return step * config.batch_size
    from vit_jax.data import native_batches

    before = native_batches.Cycle(config).images_before
    stop = data_step(step - 1, skipped) + 1
    left_out = sum(before(first + n) - before(first) for first, n in skipped if first < stop)
    return before(stop) - left_out


def draw(seed: int, step: int, steps: int = 1) -> np.ndarray:
    """(steps,) numbers in [0, 1), of the steps from `step` on."""
    bits = np.random.Philox(key=seed + (_CHOICE << 64), counter=step).random_raw(4 * steps)
    return (bits[::4] >> np.uint64(11)) * 2.0**-53
