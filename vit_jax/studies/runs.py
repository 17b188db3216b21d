"""The runs below a folder, as they were written: also those that are under way, were killed, diverged or
are of another version.
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterator, Sequence

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places, schema
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.checkpoints import descriptions, reading
from vit_jax.models import registry
from vit_jax.recipes import user_files

METRICS, RECIPE, RESULT, GOODPUT = "metrics.jsonl", "config.py", "result.json", "goodput.json"
# Lines of training steps that are read of a run, spread over it: more would not be seen in a curve.
_LINES = 2_000
_BELOW_A_RUN = {
    "checkpoints",
    "tensorboard",
    "profile",
    "evaluations",
    "logs",
    "compiled",
    "judged",
}
# What `evaluate --follow` leaves beside a run.
_FOLLOWED_FILES = "evaluations/*.jsonl"


@dataclasses.dataclass
class Run:
    """A run as its folder tells of it.

    Attributes:
      name: its folder, below that which all have in common.
      config: by dotted name; `None` if it cannot be known.
      curves: (steps, values) by name: `loss`, `images_per_second`, `eval/accuracy`, …
      state: `done`, `diverged`, `unfinished`, or `no metrics`.
      metric: the name of what it is judged by; '' if it was not evaluated.
      value: of its last evaluation.
      step: the last of which there are metrics.
      shares: what its time went into, by `clock.KINDS`.
      notes: what is wrong with it, in sentences.
      reached: the evaluation that reached `eval.target`, see `goals.Goals`; `None` if none did.
      followed: what `evaluate --follow` found, curves by 'NAME: METRIC'.
    """

    name: str
    config: dict | None
    curves: dict[str, tuple[np.ndarray, np.ndarray]]
    state: str
    metric: str
    value: float
    step: int
    shares: dict[str, float]
    notes: list[str]
    reached: dict | None = None
    followed: dict[str, tuple[np.ndarray, np.ndarray]] = dataclasses.field(default_factory=dict)

    def last(self, name: str) -> float:
        """The end of a curve; not a number without one."""
        _, values = self.curves.get(name, ((), (math.nan,)))
        return float(values[-1])

    def median(self, name: str) -> float:
        """Of a curve; not a number without one."""
        _, values = self.curves.get(name, ((), ()))
        values = np.asarray(values)[np.isfinite(values)]
        return float(np.median(values)) if len(values) else math.nan

    @property
    def exaflops(self) -> float:
        """10¹⁸ operations of all its steps, as `flops` of its model counts them."""
        seconds, speed = self.median("step_seconds"), self.median("model_flops_per_second")
        return self.step * seconds * speed / 1e18


def find_runs(folders: Sequence[epath.PathLike]) -> list[Run]:
    """The runs below some folders, in the order of their names.

    Raises:
      ConfigError: there is no such folder, or no run below it.
    """
    paths: list[epath.Path] = []
    for folder in folders:
        folder = places.locate(folder, "DIR")
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder{places.nearest_existing(folder)}")
        below = list(_workdirs(folder))
        if not below:
            raise ConfigError(
                f"{folder} holds no run: none of its folders has {METRICS} or {RECIPE}. Give a run's "
                "workdir, a sweep's, or a folder of several"
            )
        paths += [path for path in below if path not in paths]
    names = _names(paths)
    return [read_run(path, name) for path, name in zip(paths, names, strict=True)]


def read_run(folder: epath.Path, name: str) -> Run:
    """One run; whatever is wrong with its files is among its notes."""
    notes: list[str] = []
    config = _config(folder, notes)
    curves, broken = _curves(folder / METRICS)
    if broken:
        notes.append(f"{broken} lines of {METRICS} cannot be read and are skipped.")
    step = int(max((steps[-1] for steps, _ in curves.values()), default=0))
    result = places.read_json(folder / RESULT)
    ended = result is not None and result.get("step") == step
    results = {
        n.removeprefix("eval/"): y[-1] for n, (_, y) in curves.items() if n.startswith("eval/")
    }
    best = (result or {}).get("best") or {}
    metric, value = _judged(config, results, best.get("metric", ""))
    loss = curves.get("loss")
    diverged = loss is not None and not math.isfinite(loss[1][-1])
    state = "no metrics"
    if curves:
        state = "diverged" if diverged else "unfinished"
    if curves and ended:
        state = "done"
    goodput = places.read_json(folder / GOODPUT) or {}
    seconds = goodput.get("seconds", {})
    total = sum(seconds.values())
    shares = {kind: spent / total for kind, spent in seconds.items()} if total else {}
    followed = _followed(folder, notes)
    reached = (result or {}).get("reached")
    return Run(name, config, curves, state, metric, value, step, shares, notes, reached, followed)


def _followed(folder: epath.Path, notes: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    by_name = {}
    for path in sorted(folder.glob(_FOLLOWED_FILES)):
        curves, broken = _curves(path)
        if broken:
            notes.append(f"{broken} lines of {path.name} cannot be read and are skipped.")
        for metric, curve in curves.items():
            if metric.startswith("eval/"):
                by_name[f"{path.stem}: {metric.removeprefix('eval/')}"] = curve
    return by_name


def is_run(folder: epath.Path) -> bool:
    """Whether a folder is a run's workdir."""
    return (folder / METRICS).exists() or (folder / RECIPE).exists()


def _workdirs(folder: epath.Path) -> Iterator[epath.Path]:
    if is_run(folder):
        yield folder
    for below in sorted(folder.iterdir()):
        if below.name not in _BELOW_A_RUN and below.name[0] != "." and below.is_dir():
            yield from _workdirs(below)


def _names(paths: Sequence[epath.Path]) -> list[str]:
    """What tells the folders apart, or the last part of one alone."""
    parts = [os.fspath(path).split("/") for path in paths]
    shared = len(os.path.commonprefix(parts)) if len(parts) > 1 else -1
    return ["/".join(names[shared:]) or names[-1] for names in parts]


def _config(folder: epath.Path, notes: list[str]) -> dict | None:
    """By dotted name, with the model's options as the model has them."""
    try:
        description = reading.newest_description(folder)
        if description is not None:
            return schema.flat(descriptions.filled_config(description))
        if (folder / RECIPE).exists():
            config = user_files.load_config(os.fspath(folder / RECIPE))
            given = {n: v for n, v in config.model.items() if v is not None and n != "name"}
            model = registry.model_config(
                config.model.name, image_size=config.data.image_size, **given
            )
            return schema.flat(descriptions.with_model_options(config.to_dict(), model))
        notes.append(
            f"Its config is not known: it has no {RECIPE}, and no checkpoint of this version that is whole."
        )
    # A run of another version may be described by names that are not known here.
    except (UserError, KeyError, TypeError, ValueError) as error:
        notes.append(f"Its config cannot be read ({error}): is it a run of another version?")
    return None


def _curves(path: epath.Path) -> tuple[dict[str, tuple[np.ndarray, np.ndarray]], int]:
    """(steps, values) by name, and how many lines are no JSON. A step that a restart repeated counts
    once, as it was last.
    """
    if not path.exists():
        return {}, 0
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        logging.warning("%s cannot be read (%s): continuing without it", path, error)
        return {}, 0
    every = max(1, len(lines) // _LINES)
    chosen = (
        line
        for number, line in enumerate(lines)
        if number % every == 0 or number == len(lines) - 1 or b'"eval/' in line
    )
    points_by_name: dict[str, dict[int, float]] = {}
    broken = 0
    for line in chosen:
        try:
            scalars = json.loads(line)
            step = int(scalars.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            broken += 1
            continue
        for name, value in scalars.items():
            if value is None or isinstance(value, int | float):
                points_by_name.setdefault(name, {})[step] = math.nan if value is None else value
    curves = {}
    for name, points in points_by_name.items():
        steps = np.array(sorted(points))
        curves[name] = steps, np.array([points[step] for step in steps], np.float64)
    return curves, broken


def _judged(config: dict | None, results: dict[str, float], recorded: str) -> tuple[str, float]:
    """The metric by which a run is judged, and its last value.

    Args:
      recorded: the metric of the best evaluation in result.json; '' if there is none.
    """
    if not results:
        return "", math.nan
    name = (config or {}).get("eval.best", "").partition(":")[0] or recorded
    if name not in results:  # what it was to be judged by is not among what was found
        name = next(iter(results))
    return name, float(results[name])
