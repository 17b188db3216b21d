"""What fits into a given time: a linear head on features, or training the whole model, on images as large as it was
trained on or smaller ones.
"""

import dataclasses
from collections.abc import Sequence

from vit_jax.base.sizes import Size
from vit_jax.studies.linear_head import Speed

HEAD, WHOLE = "linear head", "whole model"
# A training step costs so many times the features of its images. Initialising, compiling the step and the evaluations,
# and saving take so many times as long as compiling features, and at least so many seconds. See
# docs/notes/2026-11-26-classify.md.
_STEP, _STARTING, _LEAST = 2.3, 12.0, 25.0
_MARGIN = 1.15  # of what is measured
FEWEST = 100  # steps that are worth the while, half as many at the smallest size; fewer only where the recipe has fewer
_SMALLER = 0.7  # of a side: half of the patches


@dataclasses.dataclass(frozen=True)
class Way:
    """One way to a classifier.

    Attributes:
      kind: `HEAD` or `WHOLE`.
      image_size: of the images that the model sees.
      steps: to train; 0 for a head.
      seconds: that it takes here.
    """

    kind: str
    image_size: Size
    steps: int
    seconds: float

    def text(self) -> str:
        """'whole model at 160 px, 120 steps'."""
        steps = f", {self.steps:,} steps" if self.steps else ""
        return f"{self.kind} at {self.image_size} px{steps}"


def smaller_size(size: Size, patch: object) -> int | None:
    """A side for half of the patches; `None` of images that are small already, or not square."""
    if not isinstance(size, int) or not isinstance(patch, int) or size < 12 * patch:
        return None
    return patch * round(_SMALLER * size / patch)


def ways(
    speed: Speed,
    sizes: Sequence[int],
    *,
    images: int,
    held_out: int,
    batch_size: int,
    steps: int,
    seconds: float,
    fewest: int = FEWEST,
    with_head: bool = True,
) -> list[Way]:
    """All ways, the best last: each trains as many of the recipe's steps as fit, or `fewest` if fewer do.

    Args:
      speed: of features of images of `sizes[-1]` pixels.
      sizes: of images to train the whole model on, rising.
      images, held_out: of the set.
      batch_size, steps: of the recipe.
      seconds: that there are.
      fewest: steps that are worth the while.
      with_head: whether there are weights whose features a head may have.
    """
    head = _MARGIN * speed.seconds_each * (images + held_out)
    results = [Way(HEAD, sizes[-1], 0, head)] if with_head else []
    for size in sizes:
        each = speed.seconds_each * (size / sizes[-1]) ** 2
        starting = max(_STARTING * speed.compiling, _LEAST) + 12 * each * max(held_out, batch_size)
        of_step = _MARGIN * _STEP * each * batch_size
        before = starting + (head if with_head else 0.0)
        fitting = int((seconds - before) / of_step)
        least = fewest // 2 if size == sizes[0] else fewest
        chosen = max(min(steps, fitting), min(steps, least))
        results.append(Way(WHOLE, size, chosen, before + of_step * chosen))
    return results


def choose(options: Sequence[Way], seconds: float) -> Way:
    """The best that fits, or else the quickest."""
    fitting = [way for way in options if way.seconds <= seconds]
    return fitting[-1] if fitting else min(options, key=lambda way: way.seconds)
