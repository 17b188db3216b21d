"""Curves of earlier runs: a metric over epochs of one or several seeds, and what it is a curve of. Those of the
package, which papers' authors published, are in `curves.json`; others are in files of the same form, or made of runs.

How a run is compared with one is in `reference.py`.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, with_role
from vit_jax.base.sizes import height_width, parse
from vit_jax.checkpoints import descriptions, reading
from vit_jax.checkpoints.evaluations import evaluations
from vit_jax.config import Config, default_config
from vit_jax.models import classifier, registry

FILE = "reference.json"
_PACKAGE = pathlib.Path(__file__).with_name("curves.json")
# What makes a run more than where and how often something is kept: the parts of a recipe.
_RECIPE = ("batch_size", "duration", "augment.", "data.", "model.", "objective.", "optim.")
_NO_RECIPE = (
    "data.path", "data.eval_split", "data.threads", "data.read_ahead", "data.prefetch", "data.cache",
    "data.cache_gib", "model.remat", "model.unroll", "model.dtype_on_cpu", "model.attention", "model.num_classes",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Band:
    """A curve at one epoch: the mean of its seeds, the lowest and the highest, and how many they are."""

    mean: float
    low: float
    high: float
    seeds: int


@dataclasses.dataclass(frozen=True)
class Curve:
    """A metric over the epochs of earlier runs.

    Attributes:
      name: of the curve.
      source: where its figures are from.
      metric: what they are of, as evaluators call it.
      model: options of the model's size, by name.
      data: `name`, `classes`, `training_examples`, `evaluated_examples`, and `image_size` as (height, width).
      epochs: how long the runs were planned to be.
      recipe: the fields of the config that made them, by dotted name; those that are not in it are at their
        defaults, and `None` are not known.
      runs: of each seed [[epoch, value], …], in the order of the epochs.
    """

    name: str
    source: str
    metric: str
    model: Mapping
    data: Mapping
    epochs: float
    recipe: Mapping
    runs: Sequence[Sequence[Sequence[float]]]

    @property
    def published(self) -> bool:
        """Whether it is one of the package's."""
        return self.name in _published()

    @property
    def end(self) -> float:
        """The last epoch of the longest run."""
        return max(run[-1][0] for run in self.runs)

    def at(self, epoch: float) -> Band | None:
        """The runs that have come to this epoch, between two of their points interpolated; `None` before and after."""
        values = [
            float(np.interp(epoch, *np.transpose(run)))
            for run in self.runs
            if run[0][0] <= epoch <= run[-1][0]
        ]
        if not values:
            return None
        return Band(math.fsum(values) / len(values), min(values), max(values), len(values))

    def to_json(self) -> str:
        """The text of its file."""
        return json.dumps(dataclasses.asdict(self)) + "\n"


def absolute_name(name: str) -> str:
    """A value of `config.reference.curve` that means the same from every working folder: a path is made absolute, a
    name stays as it is.
    """
    is_path = name not in _published() and ("/" in name or places.exists(name))
    return places.absolute(name, "config.reference.curve") if is_path else name


def read_curve(name: str) -> Curve:
    """The curve that `config.reference.curve` names.

    Raises:
      ConfigError: there is none of this name, or what is there is no curve.
    """
    where = f"config.reference.curve = {name!r}"
    published = _published()
    if name in published:
        return Curve(name=name, **published[name])
    path = places.locate(name, "config.reference.curve")
    if path.is_dir():
        return read_curve(str(path / FILE)) if (path / FILE).exists() else curve_of_runs([path])
    if not path.exists():
        raise ConfigError(
            f"{where}: there is no such file, no such workdir of a run, and no such curve in the package"
            f"{nearest(os.path.basename(name), published)}"
        )
    try:
        curve = Curve(**json.loads(path.read_text()))
        lengths = {len(point) for run in curve.runs for point in run}
        if lengths != {2} or not all(curve.runs):
            raise ValueError("runs must be [[[epoch, value], …], …]")
        for run in curve.runs:
            if np.any(np.diff(np.asarray(run, np.float64)[:, 0]) <= 0):
                raise ValueError("the epochs of a run must rise")
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"{where} is no curve ({error}): 'vit_jax report RUN --as_reference' makes one"
        ) from error
    return curve


def curve_of_runs(workdirs: Sequence[epath.Path]) -> Curve:
    """The curve of runs that differ in nothing but their seeds, by their first evaluator's first metric or
    `config.eval.best`.

    Raises:
      ConfigError: a run was never evaluated, or says too little of itself; or the runs differ in more.
    """
    curves = [_of_run(workdir) for workdir in workdirs]
    first = curves[0]
    for workdir, other in zip(workdirs, curves, strict=True):
        changed = differences(first.recipe, other.recipe)
        if changed or (first.metric, first.data) != (other.metric, other.data):
            raise ConfigError(
                f"{workdir} is no other seed of {workdirs[0]}: {'; '.join(changed) or 'its metric or data differ'}"
            )
    return dataclasses.replace(first, runs=[run for curve in curves for run in curve.runs])


def _of_run(workdir: epath.Path) -> Curve:
    description = reading.newest_description(workdir)
    if description is None or not (workdir / "metrics.jsonl").exists():
        raise ConfigError(f"config.reference.curve: {workdir} holds no run that describes itself")
    config = descriptions.filled_config(description)
    metrics_by_step = evaluations(workdir)
    if len(metrics_by_step) < 2:
        raise ConfigError(
            f"config.reference.curve: {workdir} was evaluated {len(metrics_by_step)} times, which is no curve: set "
            "config.eval.every for such a run"
        )
    last = metrics_by_step[max(metrics_by_step)]
    best = description.get("best") or {}
    metric = best.get("metric") or config["eval"]["best"].partition(":")[0] or next(iter(last))
    if metric not in last:
        raise ConfigError(
            f"config.reference.curve: {workdir} was last evaluated without the metric {metric!r} of its "
            f"config.eval.best{nearest(metric, last)}"
        )
    examples, batch = description["training_examples"], config["batch_size"]
    run = [
        [step * batch / examples, metrics[metric]]
        for step, metrics in sorted(metrics_by_step.items())
        if metrics.get(metric) is not None
    ]
    return Curve(
        name=workdir.name,
        source=str(workdir),
        metric=metric,
        model=sizes_of(descriptions.stored_model_config(description)),
        data={
            "name": config["data"]["name"],
            "classes": len(description["classes"]),
            "training_examples": examples,
            "evaluated_examples": last.get("examples"),
            "image_size": list(height_width(parse(config["data"]["image_size"]))),
        },
        epochs=run[-1][0],
        recipe=recipe_of(config),
        runs=[run],
    )


@functools.cache
def _published() -> dict[str, dict]:
    return json.loads(_PACKAGE.read_text())


def sizes_of(model: classifier.ClassifierConfig) -> dict:
    """The options of a model that say how large it is."""
    return json.loads(
        json.dumps({name: getattr(model, name) for name in with_role(type(model), "size")})
    )


def with_model(config: Config, model: classifier.ClassifierConfig) -> dict:
    """A run's config as JSON has it, its model's options filled in."""
    return descriptions.with_model_options(dataclasses.asdict(config), model)


def recipe_of(config: Mapping) -> dict:
    """What of a config, with its model's options filled in, is its recipe: by dotted name."""
    flat = {}
    for name, value in config.items():
        inner = value.items() if isinstance(value, Mapping) else [(None, value)]
        flat |= {
            name if key is None else f"{name}.{key}": inner_value for key, inner_value in inner
        }
    flat = json.loads(json.dumps(flat))
    return {n: v for n, v in flat.items() if n.startswith(_RECIPE) and n not in _NO_RECIPE}


def default_recipe(model_name: str) -> dict:
    """`recipe_of` the default config with a model of this name."""
    config = default_config()
    config.model.name = model_name
    model = registry.model_config(model_name, image_size=config.data.image_size)
    return recipe_of(descriptions.with_model_options(config.to_dict(), model))


def differences(recipe: Mapping, other: Mapping) -> list[str]:
    """What the second has otherwise than the first, of the fields that both know: 'optim.lr is 0.03 (0.003)'."""
    known = [name for name, value in recipe.items() if name in other and value is not None]
    return [f"{n} is {other[n]!r} ({recipe[n]!r})" for n in known if recipe[n] != other[n]]
