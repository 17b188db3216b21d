"""The steps of a run whose images or patches have several sizes (`config.data.size_schedule`, `patch_sizes`): whether
the networks can learn from it, and what the steps cost. Which step has which size is in `data.size_schedule` and
`data.patch_sizes`.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.config import Config
from vit_jax.data import native_batches, patch_sizes, size_schedule, views
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


def describe_patches(data: Data, networks: Networks, passes: int) -> str:
    """The patch sizes and what a step of each costs, in a sentence; arguments as of `find_phases`."""
    shares = patch_sizes.find_sizes(data)
    flops = {n: passes * networks.at_size(data.image_size, n).objective.flops() for n in shares}
    mean = sum(shares[size] * flops[size] for size in shares)
    parts = [f"{size} ({share:.0%}, {flops[size]:.3g} FLOP)" for size, share in shares.items()]
    return (
        f"patch sizes, one a step: {', '.join(parts)}; {mean:.3g} FLOP a step on average. The kernel has "
        f"{networks.model_config.patch} pixels a side, and is resized bilinearly without antialiasing"
    )


def check_phases(config: Config, networks: Networks) -> None:
    """Raises `ConfigError` if model or objective cannot learn from images or patches of all sizes with the same
    parameters.
    """
    field = "patch_sizes" if config.data.patch_sizes else "size_schedule"
    where, objective = f"config.data.{field}", networks.objective
    if objective.needs_views or objective.needs_masks:
        what = (
            "several views, which config.data.view_sizes sets the sizes of"
            if objective.needs_views
            else "masks, of one size"
        )
        raise ConfigError(
            f"{where}: the objective {config.objective.name!r} learns from {what}; set {where}=()"
        )
    own = networks.abstract_modules()
    for variant in views.variants(config):
        size = variant.data.image_size
        try:
            at_size = networks.at_size(size, variant.patch)
            if at_size.stored:
                resized.check_resized(at_size.stored, at_size.model_config, resized.SCHEDULED)
            changed = _changed(own, at_size.abstract_modules())
            if changed:
                raise ConfigError(
                    f"{changed} of the objective {config.objective.name!r} depends on the size"
                )
        except ConfigError as error:
            patches = f" in patches of {variant.patch}" if variant.patch else ""
            raise ConfigError(
                f"{where}: {config.model.name} cannot learn from images of {sizes.size_text(size)} pixels{patches} in "
                f"some steps: {error}"
            ) from error


def _changed(before, after) -> str:
    """The name of an array that has another shape; '' if there is none."""
    trees = patterns.named(before.params), patterns.named(after.params)
    names = [name for name, x in trees[0].items() if x.shape != trees[1][name].shape]
    return names[0] if names else ""


def split_run(outline: Any) -> list[Any]:
    """The run with each of `views.variants` alone, images of one size: a row of so many patches stands for any grid of
    them, which cost the same. `outline`: of the run, an `assembly.Outline`.
    """
    each = []
    for variant in views.variants(outline.config):
        data = dataclasses.replace(variant.data, native_tokens=0, patch_sizes=())
        size = data.image_size
        if variant.data.native_tokens:
            size = data.native_patch, data.native_patch * variant.data.native_tokens
        config = dataclasses.replace(outline.config, data=data, batch_size=variant.batch_size)
        networks = outline.networks.at_size(size, variant.patch)
        parts = {"config": config, "networks": networks, "model_config": networks.model_config}
        each.append(dataclasses.replace(outline, **parts))
    return each


def flops_of_steps(outline: Any, first: int, stop: int) -> int:
    """`Outline.flops` of images at sizes of their own, or in patches of several sizes."""
    data, seed = outline.config.data, outline.config.seed
    if data.native_tokens:
        counts = native_batches.Cycle(outline.config).counts(first, stop)
    else:
        counts = patch_sizes.count_sizes(data, views.draw(seed, first, stop - first))
    return sum(n * alone.step_flops for n, alone in zip(counts, split_run(outline), strict=True))
