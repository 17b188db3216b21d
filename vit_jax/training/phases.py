"""The steps of a run with a schedule of image sizes (`config.data.size_schedule`), by the size of their images: whether
the networks can learn from it, and what the steps cost. Which step has which size is in `data.size_schedule`.
"""

import dataclasses
import operator
from collections.abc import Sequence
from typing import Any

from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.config import Config
from vit_jax.data import native_batches, size_schedule, views
from vit_jax.data.options import Data
from vit_jax.models import resized
from vit_jax.objectives.networks import Networks


@dataclasses.dataclass(frozen=True)
class Phase:
    """Steps whose images have one size.

    Attributes:
      image_size: of the images.
      first, stop: the steps `first` to `stop` - 1, from 0.
      step_flops: operations of a step, as `Outline.step_flops` counts them.
    """

    image_size: Size
    first: int
    stop: int
    step_flops: int

    def flops(self, first: int, stop: int) -> int:
        """Operations of those of the steps `first` to `stop` - 1 that are in this phase."""
        return self.step_flops * max(0, min(stop, self.stop) - max(first, self.first))


def find_phases(data: Data, networks: Networks, total_steps: int, passes: int) -> tuple[Phase, ...]:
    """The phases of a run, in their order.

    Args:
      data: `config.data`, with a schedule.
      networks: of the run.
      total_steps: its length.
      passes: of an image's forward pass that a step counts as, for all its images together.
    """
    first = size_schedule.first_steps(data, total_steps)
    all_sizes = [phase.data.image_size for phase in size_schedule.phases(data)]
    return tuple(
        Phase(size, start, stop, passes * networks.at_size(size).objective.flops())
        for size, start, stop in zip(all_sizes, first, [*first[1:], total_steps], strict=True)
    )


def describe(phases: Sequence[Phase]) -> str:
    """The sizes by step, and what they save, in a sentence."""
    parts = [
        f"{sizes.size_text(phase.image_size)} from step {phase.first + 1:,} on ({phase.step_flops:.3g} FLOP a step)"
        for phase in phases
    ]
    last = phases[-1]
    total = sum(phase.flops(0, last.stop) for phase in phases)
    return (
        f"image sizes: {', '.join(parts)}; {total:.3g} FLOP in all, {1 - total / (last.step_flops * last.stop):.1%} "
        f"less than with {sizes.size_text(last.image_size)} pixels throughout"
    )


def check_phases(config: Config, networks: Networks) -> None:
    """Raises `ConfigError` if model or objective cannot learn from images of all sizes with the same parameters."""
    where, objective = "config.data.size_schedule", networks.objective
    if objective.needs_views or objective.needs_masks:
        what = (
            "several views, which config.data.view_sizes sets the sizes of"
            if objective.needs_views
            else "masks, of one size"
        )
        raise ConfigError(
            f"{where}: the objective {config.objective.name!r} learns from {what}; set {where}=()"
        )
    own = networks.abstract_own()
    for phase in size_schedule.phases(config.data):
        size = phase.data.image_size
        try:
            at_size = networks.at_size(size)
            if at_size.stored:
                resized.check_resized(at_size.stored, at_size.model_config, resized.SCHEDULED)
            changed = _changed(own, at_size.abstract_own())
            if changed:
                raise ConfigError(
                    f"{changed} of the objective {config.objective.name!r} depends on the size"
                )
        except ConfigError as error:
            raise ConfigError(
                f"{where}: {config.model.name} cannot learn from images of {sizes.size_text(size)} pixels in some "
                f"steps: {error}"
            ) from error


def _changed(before, after) -> str:
    """The name of an array that has another shape; '' if there is none."""
    trees = patterns.named(before.params), patterns.named(after.params)
    names = [name for name, x in trees[0].items() if x.shape != trees[1][name].shape]
    return names[0] if names else ""


def flops_of_lengths(outline: Any) -> list[int]:
    """Operations of a step with each of `config.data.native_lengths`: a row of so many patches costs the same as any
    grid of them. `outline`: of the run, an `assembly.Outline`.
    """
    each = []
    for variant in views.variants(outline.config):
        data = dataclasses.replace(variant.data, native_tokens=0)
        size = data.native_patch, data.native_patch * variant.data.native_tokens
        config = dataclasses.replace(outline.config, data=data, batch_size=variant.batch_size)
        networks = outline.networks.at_size(size)
        each.append(dataclasses.replace(outline, config=config, networks=networks).step_flops)
    return each


def native_flops(outline: Any, first: int, stop: int) -> int:
    """`Outline.flops` of images at sizes of their own."""
    counts = native_batches.Cycle(outline.config).counts(first, stop)
    return sum(map(operator.mul, counts, flops_of_lengths(outline)))
