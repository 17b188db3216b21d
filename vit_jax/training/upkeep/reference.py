"""A run beside a curve of earlier ones (`config.reference`): at every evaluation a sentence that says where the run
stands, and the end of a run that has fallen too far behind. The curves are in `curves.py`.
"""

import dataclasses
from collections.abc import Sequence

from absl import logging

from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.sizes import height_width
from vit_jax.config import Config
from vit_jax.data import views
from vit_jax.data.record import Source
from vit_jax.evaluation import Suite, is_share
from vit_jax.evaluation.contract import held_out
from vit_jax.evaluation.metric_order import DIRECTIONS, MetricOrder
from vit_jax.training.assembly import Assembly
from vit_jax.training.upkeep.curves import (
    Band,
    Curve,
    default_recipe,
    differences,
    read_curve,
    recipe_of,
    sizes_of,
    with_model,
)

# Evaluations whose mean is judged: one of a healthy run may be far below (docs/notes/2026-11-23-watch.md).
_LAST = 3
# Numbers of images that differ by less are of the same data set, of which some are held out.
_SAME_SIZE = 0.02
# Data that users bring, whose name says nothing about what it is.
_NAMELESS = ("folder", "prepared", "tar", "mixture")
_USUAL_CAUSES = (
    "What most often is wrong: the labels (some are wrong, or in another order); the normalisation "
    "(config.data.mean, std); how images are cut for evaluation (config.data.eval_crop, eval_resize) or augmented "
    "(config.augment); the learning rate and its warm-up (config.optim.lr, warmup); config.batch_size, which is that "
    "of all devices together."
)


class BelowReference(UserError):
    """A run ended since it is too far below its reference curve."""


@dataclasses.dataclass(frozen=True)
class Compared:
    """An evaluation beside a curve.

    Attributes:
      sentence: for people.
      scalars: for the files: the curve's value, the ends of its band and the difference.
      error: why the run has to end; `None` if it continues.
    """

    sentence: str
    scalars: dict[str, float]
    error: BelowReference | None


@dataclasses.dataclass
class Reference:
    """The curve of a run, and what is needed to place an evaluation on it.

    Attributes:
      curve: of earlier runs.
      order: which way is good of the curve's metric.
      config: of this run.
      recipe: of this run, as `curves.recipe_of` gives it.
      epochs_per_step: of this run.
      not_before: the step from which on the run may be ended.
      behind: by how much the last evaluations were below the curve; one alone may be bad luck.
    """

    curve: Curve
    order: MetricOrder
    config: Config
    recipe: dict
    epochs_per_step: float
    not_before: int
    behind: list[float] = dataclasses.field(default_factory=list)

    def compare(self, step: int, metrics: dict[str, float]) -> Compared:
        """Places the metrics of an evaluation after `step` on the curve."""
        curve, epoch = self.curve, step * self.epochs_per_step
        value, band = metrics[curve.metric], curve.at(epoch)
        scale, unit = (100.0, " %") if is_share(curve.metric) else (1.0, "")
        known = f"epoch {epoch:.4g}: {scale * value:.4g}{unit}"
        if band is None:
            where = f"covers epochs {min(run[0][0] for run in curve.runs):.4g} to {curve.end:.4g}"
            return Compared(f"{known}; the curve {curve.name} {where} alone", {}, None)
        who = "the authors" if curve.published else curve.name
        sentence = f"{known}; {who} had {scale * band.mean:.4g}{_spread(band, scale)}"
        scalars = {
            f"reference/{curve.metric}": band.mean,
            f"reference/{curve.metric}_low": band.low,
            f"reference/{curve.metric}_high": band.high,
            "reference/difference": value - band.mean,
        }
        sign = DIRECTIONS[self.order.direction]
        worst = band.low if sign > 0 else band.high
        error = self._error(step, scale * sign * (worst - value), sentence)
        return Compared(sentence, scalars, error)

    def _error(self, step: int, below: float, sentence: str) -> BelowReference | None:
        allowed = self.config.reference.stop_below
        self.behind = [*self.behind, below][-_LAST:]
        mean = sum(self.behind) / len(self.behind)
        if not allowed or step < self.not_before or len(self.behind) < 2 or mean <= allowed:
            return None
        usual = default_recipe(self.config.model.name)
        changed = differences(usual | dict(self.curve.recipe), self.recipe)
        other = (
            f"Different from the curve's recipe: {'; '.join(changed)}."
            if changed
            else "Nothing that is known of the curve's recipe is different here."
        )
        return BelowReference(
            f"{sentence}. The last {len(self.behind)} evaluations "
            f"were {mean:.3g} points worse on average, more than config.reference.stop_below = {allowed:g}. "
            f"{_USUAL_CAUSES} {other} To continue all the same: --config.reference.stop_below=0"
        )


def make_reference(assembly: Assembly, source: Source, suite: Suite) -> Reference | None:
    """The reference of a run that names a curve; `None` where that is of something else, which is logged.

    Args:
      source, suite: its examples and evaluators.

    Raises:
      ConfigError: see `check_reference`.
    """
    curve, notes = check_reference(assembly, source, suite)
    for note in notes:
        logging.warning("%s", note)
    if curve is None:
        return None
    config = assembly.config
    recipe = recipe_of(with_model(config, assembly.model_config))
    not_before = assembly.to_steps(config.reference.stop_after)
    return Reference(
        curve=curve,
        order=suite.metric_order(curve.metric),
        config=config,
        recipe=recipe,
        epochs_per_step=views.images_per_step(config) / len(source),
        not_before=not_before,
    )


def check_reference(
    assembly: Assembly, source: Source | None, suite: Suite | None
) -> tuple[Curve | None, list[str]]:
    """The curve that a run names, `None` where it is not compared with it, and what is to be noted about it.

    Args:
      source, suite: its examples and evaluators, if the data is at hand.

    Raises:
      ConfigError: there is no such curve; or the run is to be ended by a curve that it cannot be compared with.
    """
    config = assembly.config
    name, stop_below = config.reference.curve, config.reference.stop_below
    curve = read_curve(name)
    if source is None or suite is None:
        return None, []
    reasons = why_not(curve, assembly, source, suite)
    if reasons:
        message = f"not compared with config.reference.curve = {name!r}: {'; '.join(reasons)}"
        if stop_below:
            raise ConfigError(
                f"{message}. So config.reference.stop_below = {stop_below:g} cannot end the run: set it to 0"
            )
        return None, [message]
    epochs = views.images_before(config, assembly.total_steps) / len(source)
    if epochs <= curve.end * (1 + _SAME_SIZE):
        return curve, []
    return curve, [
        f"the curve {name} ends at epoch {curve.end:.4g}, and the run at {epochs:.4g}: what comes after is not compared"
    ]


def why_not(curve: Curve, assembly: Assembly, source: Source, suite: Suite) -> list[str]:
    """Why a run cannot be compared with a curve: of each thing that is not the curve's, a phrase."""
    config = assembly.config
    model = sizes_of(assembly.model_config)
    reasons = []
    for name, value in curve.model.items():
        if model.get(name) != value:
            reasons.append(f"its model has {name} {value}, the run's {model.get(name)}")
    image_size = list(height_width(config.data.image_size))
    size_of_curve = curve.data["image_size"]
    if list(size_of_curve) != image_size:
        reasons.append(
            f"its images have {_pixels(size_of_curve)} pixels, the run's {_pixels(image_size)}"
        )
    names = {curve.data["name"], config.data.name}
    if len(names) > 1 and names.isdisjoint(_NAMELESS):
        reasons.append(f"it is of {curve.data['name']}, the run of {config.data.name}")
    reasons += _other_numbers(curve, source, suite)
    metrics = suite.metrics()
    if metrics is not None and curve.metric not in metrics:
        reasons.append(
            f"it is of the metric {curve.metric!r}, and evaluations have {', '.join(metrics)}"
        )
    every = assembly.to_steps(config.eval.every)
    if every == 0 or every >= assembly.total_steps:
        reasons.append("the run is evaluated at its end only: set config.eval.every")
    return reasons


def _other_numbers(curve: Curve, source: Source, suite: Suite) -> list[str]:
    """The phrases for the numbers of a run's data that are not those of a curve."""
    evaluated = None
    for _, evaluator in suite.evaluators:
        held = held_out(evaluator)
        if held is not None:
            evaluated = len(held)
            break
    numbers = {
        "classes": len(source.classes),
        "training_examples": len(source),
        "evaluated_examples": evaluated,
    }
    phrases = []
    for name, number in numbers.items():
        known = curve.data.get(name)
        if not known or not number:
            continue
        tolerance = 0 if name == "classes" else _SAME_SIZE * known
        if abs(number - known) > tolerance:
            phrases.append(f"it has {known:,} {name.replace('_', ' ')}, the run {number:,}")
    return phrases


def _pixels(size: Sequence[int]) -> str:
    return "x".join(map(str, size))


def _spread(band: Band, scale: float) -> str:
    """' (−0.3 … +0.5 over 5 seeds)', or nothing of a single one."""
    if band.seeds == 1:
        return ""
    low, high = (scale * (end - band.mean) for end in (band.low, band.high))
    return f" (−{abs(low):.2g} … +{high:.2g} over {band.seeds} seeds)"
