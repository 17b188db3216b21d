"""Image sizes by step, `config.data.size_schedule`: a run begins with small images, whose steps are cheap, and ends
with images of `config.data.image_size`, at which it is evaluated and whose positions its parameters are.

The size is a function of the step alone. The batch and the learning rate are those of every other run.
"""

import bisect
import dataclasses
from collections.abc import Callable

from vit_jax.base import durations, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.data import crops
from vit_jax.data.options import Data


@dataclasses.dataclass(frozen=True)
class Phase:
    """An entry of a schedule.

    Attributes:
      start: the share of the run after which it begins.
      data: `config.data` from then on.
    """

    start: float
    data: Data


def phases(data: Data) -> tuple[Phase, ...]:
    """The entries of `data.size_schedule`, in the order of the run.

    Raises:
      ConfigError: one of them is no share and size, they are not in order, or the last size is not `data.image_size`.
    """
    where, entries = "config.data.size_schedule", [_entry(entry) for entry in data.size_schedule]
    shares = [share for share, _ in entries]
    if shares[0] != 0 or sorted(set(shares)) != shares or shares[-1] >= 1:
        raise ConfigError(
            f"{where} begins after the shares {shares} of the run: the first must be 0, and each larger than the "
            "previous one and below 1"
        )
    if sizes.height_width(entries[-1][1]) != sizes.height_width(data.image_size):
        last, own = sizes.size_text(entries[-1][1]), sizes.size_text(data.image_size)
        raise ConfigError(
            f"{where} ends with images of {last} pixels, and config.data.image_size = {own}: the last size is that of "
            "the model and of its evaluation; set one of the two"
        )
    if data.views:
        raise ConfigError(
            f"{where} is for one view of an image: of config.data.views, config.data.view_sizes sets the sizes by step"
        )
    if data.permute != "none":
        raise ConfigError(
            f"{where}: config.data.permute = {data.permute!r} permutes images of one size alone"
        )
    return tuple(Phase(share, _at_size(data, size)) for share, size in entries)


def first_steps(data: Data, total_steps: int) -> list[int]:
    """The first step of each phase, from 0, in a run of `total_steps`."""
    units = {"batch_size": 1, "examples_per_epoch": None, "total_steps": total_steps}
    return [durations.steps(f"{100 * phase.start:.10g}%", **units) for phase in phases(data)]


def make_choice(data: Data, total_steps: int) -> Callable[[int], int]:
    """Step, from 0, -> which of `phases` it is in."""
    first = first_steps(data, total_steps)
    return lambda step: bisect.bisect_right(first, step) - 1


def _entry(entry: tuple) -> tuple[float, Size]:
    share, size = entry if isinstance(entry, tuple | list) and len(entry) == 2 else (None, None)
    if isinstance(share, bool) or not isinstance(share, int | float):
        raise ConfigError(
            f"config.data.size_schedule: {entry!r} is no (share of the run, image size), such as (0.4, 160)"
        )
    return share, sizes.parse(size, f"config.data.size_schedule: the size after {share:g}")


def _at_size(data: Data, size: Size) -> Data:
    """`data` for training images of another size, which show the same part of an image: what is in pixels grows
    with the size.
    """
    factor = min(sizes.height_width(size)) / min(sizes.height_width(data.image_size))
    resize, pad = max(1, round(factor * data.resize)), round(factor * data.pad)
    # Evaluation has images of the run's own size, which might not fit.
    at_size = dataclasses.replace(
        data, image_size=size, resize=resize, pad=pad, eval_crop="resize", size_schedule=()
    )
    try:
        crops.check_crops(at_size)
    except ConfigError as error:
        raise ConfigError(
            f"config.data.size_schedule, images of {sizes.size_text(size)}: {error}"
        ) from error
    return at_size
