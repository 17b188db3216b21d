"""Runs beside their reference curves (`config.reference`): a table, a picture for each curve, and the making of such
a curve from runs.
"""

from collections.abc import Sequence

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.pictures import style
from vit_jax.pictures.plot import Plot
from vit_jax.studies import compare
from vit_jax.studies.compare import Comparison
from vit_jax.studies.runs import Run
from vit_jax.training.upkeep import curves

_PREFIX = "reference/"


def save_reference(folders: Sequence[epath.PathLike], out: epath.PathLike | None) -> dict:
    """Writes the curve of runs that differ in nothing but their seeds.

    Args:
      folders: the runs' workdirs.
      out: where to; by default the first of them.

    Returns:
      `reference`: the file; `curve`: its content.

    Raises:
      ConfigError: see `curves.curve_of_runs`; or the file cannot be written.
    """
    workdirs = [places.locate(folder, "RUN") for folder in folders]
    curve = curves.curve_of_runs(workdirs)
    folder = outputs.make_folder(places.locate(out or folders[0], "--out"), "--out")
    path = folder / curves.FILE
    places.write_whole(path, curve.to_json())
    return {"reference": str(path), "curve": curve.name, "seeds": len(curve.runs)}


def sentence(result: dict) -> str:
    """`save_reference`'s result for a person."""
    path = result["reference"]
    return (
        f"{path}: {result['seeds']} seeds. Compare a run with it: --config.reference.curve={path}"
    )


def rows(comparison: Comparison) -> list[list[str]]:
    """Each run beside its curve at its last evaluation; [] where no run has one."""
    table = []
    for run in comparison.runs:
        metric = _metric(run)
        if not metric:
            continue
        step = int(run.curves[_PREFIX + metric][0][-1])
        values = {name: _at(run, name, step) for name in (f"eval/{metric}", _PREFIX + metric)}
        value, curve = values.values()
        difference = (value - curve) * compare.metric_in_words(metric)[1]
        table.append([
            run.name, run.config["reference.curve"], f"{_epochs(run, [step])[0]:.4g}",
            compare.metric_value(metric, value), compare.metric_value(metric, curve), f"{difference:+.2f}",
        ])  # fmt: skip
    return table and [["run", "curve", "epoch", "run's", "curve's", "difference"], *table]


def pictures(comparison: Comparison) -> dict[str, Image.Image]:
    """By curve: the runs, the curve and the band of its seeds, over epochs."""
    groups: dict[str, list[Run]] = {}
    for run in comparison.runs:
        if _metric(run):
            groups.setdefault(run.config["reference.curve"], []).append(run)
    return {name: _picture(name, runs) for name, runs in groups.items()}


def _picture(name: str, runs: list[Run]) -> Image.Image:
    metric = _metric(runs[0])
    words, scale = compare.metric_in_words(metric)
    plot = Plot(f"Beside the curve {name.split('/')[-1]}", x="epoch", y=words)
    epochs, mean, low, high = _curve(name, runs[0], metric)
    if np.any(high > low):
        plot.band(epochs, scale * low, scale * high, style.GREY, "its seeds")
    plot.line(epochs, scale * mean, style.GREY, "curve")
    for number, run in enumerate(runs):
        steps, values = run.curves[f"eval/{metric}"]
        colour = style.COLOURS[number % len(style.COLOURS)]
        plot.line(_epochs(run, steps), scale * values, colour, run.name, marked=True)
    return plot.image()


def _curve(name: str, run: Run, metric: str) -> tuple[np.ndarray, ...]:
    """Epochs, mean, lowest and highest of a whole curve; of one that is gone as far as the run has kept it."""
    try:
        curve = curves.read_curve(name)
    except ConfigError:
        steps, mean = run.curves[_PREFIX + metric]
        ends = (run.curves[f"{_PREFIX}{metric}_{end}"][1] for end in ("low", "high"))
        return np.asarray(_epochs(run, steps)), mean, *ends
    epochs = np.unique([point[0] for points in curve.runs for point in points])
    bands = [curve.at(epoch) for epoch in epochs]
    return epochs, *(
        np.array([getattr(band, end) for band in bands]) for end in ("mean", "low", "high")
    )


def _metric(run: Run) -> str:
    """The metric of a run that is compared with a curve; '' for none."""
    names = (name for name in run.curves if name.startswith(_PREFIX) and name.endswith("_low"))
    metric = next(names, "").removeprefix(_PREFIX).removesuffix("_low")
    return metric if run.config and run.config.get("reference.curve") else ""


def _epochs(run: Run, steps: Sequence[float]) -> np.ndarray:
    known = run.curves.get("epochs")
    if known is None:
        return np.asarray(steps, np.float64)
    last_steps, last_epochs = known
    return np.asarray(steps) * (last_epochs[-1] / last_steps[-1])


def _at(run: Run, name: str, step: int) -> float:
    steps, values = run.curves[name]
    return float(values[np.searchsorted(steps, step)])
