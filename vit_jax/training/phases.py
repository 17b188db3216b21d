"""The steps of a run with a schedule of image sizes (`config.data.size_schedule`), by the size of their images: whether
the networks can learn from it, and what the steps cost. Which step has which size is in `data.size_schedule`.
"""

import dataclasses

from vit_jax.base import patterns, sizes
from vit_jax.base.errors import ConfigError
from vit_jax.base.sizes import Size
from vit_jax.config import Config
from vit_jax.data import size_schedule, views
from vit_jax.models import resized
from vit_jax.objectives.networks import Networks
from vit_jax.training.assembly import Outline


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


def find_phases(outline: Outline) -> tuple[Phase, ...]:
    """The phases of a run, in their order."""
    data, total = outline.config.data, outline.total_steps
    first = size_schedule.first_steps(data, total)
    return tuple(
        Phase(
            phase.data.image_size,
            start,
            stop,
            dataclasses.replace(
                outline, networks=outline.networks.at_size(phase.data.image_size)
            ).step_flops,
        )
        for phase, start, stop in zip(
            size_schedule.phases(data), first, [*first[1:], total], strict=True
        )
    )


def flops(outline: Outline, first: int, stop: int) -> int:
    """Operations of the steps `first` to `stop` - 1."""
    if outline.config.data.native_lengths:
        return _flops_of_lengths(outline, first, stop)
    return sum(
        phase.step_flops * max(0, min(stop, phase.stop) - max(first, phase.first))
        for phase in find_phases(outline)
    )


def _flops_of_lengths(outline: Outline, first: int, stop: int) -> int:
    """Those of steps whose images have numbers of patches drawn by step."""
    config = outline.config
    of_variant = [
        dataclasses.replace(
            outline, config=dataclasses.replace(config, data=variant.data)
        ).step_flops
        for variant in views.variants(config)
    ]
    choose = views.make_choice(config, 1)
    return sum(of_variant[choose(step)] for step in range(first, stop))


def describe(outline: Outline) -> str:
    """The sizes by step, and what they save, in a sentence."""
    parts = [
        f"{sizes.size_text(phase.image_size)} from step {phase.first + 1:,} on ({phase.step_flops:.3g} FLOP a step)"
        for phase in find_phases(outline)
    ]
    saved = 1 - outline.flops() / (outline.step_flops * outline.total_steps)
    own = sizes.size_text(outline.config.data.image_size)
    return (
        f"image sizes: {', '.join(parts)}; {outline.flops():.3g} FLOP in all, {saved:.1%} less than with {own} "
        "pixels throughout"
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
