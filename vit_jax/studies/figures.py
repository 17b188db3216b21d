"""Pictures of a comparison: each gives an image, or `None` where there is nothing to draw."""

import functools
from collections.abc import Sequence

import numpy as np
from PIL import Image

from vit_jax.pictures import style
from vit_jax.pictures.plot import Plot
from vit_jax.studies import compare
from vit_jax.studies.compare import (
    Comparison,
    Group,
    as_number,
    axis_in_words,
    in_short,
    in_words,
    metric_in_words,
)
from vit_jax.studies.runs import Run

_PREFIXES = (("exa", 18), ("peta", 15), ("tera", 12), ("giga", 9))
_MOST = len(style.COLOURS)  # groups distinguished by colour


def by_setting(comparison: Comparison) -> Image.Image | None:
    """A line for each setting: a dot for each seed, a bar over their range."""
    words, scale = metric_in_words(comparison.metric)
    values = [(group.label, scale * group.values()) for group in comparison.groups]
    return _dots(values, f"{_title(words)} by setting", words)


def steps_to_target(comparison: Comparison) -> Image.Image | None:
    """The same of how many steps runs took to their target; those that did not reach it are in the table alone."""
    values = [(group.label, group.steps_to_target()) for group in comparison.groups]
    return _dots(values, f"Steps to {compare.target(comparison)}", "steps")


def _dots(values: Sequence[tuple[str, np.ndarray]], title: str, words: str) -> Image.Image | None:
    values = [(name, numbers) for name, numbers in values if len(numbers)]
    if not values:
        return None
    names = [name for name, _ in values]
    if any(len(numbers) > 1 for _, numbers in values):
        title += ": a dot for each run, their range, and their mean"
    plot = Plot(
        title,
        x=words, y="", y_names=names, size=(440, max(80, 26 * len(names) + 30)),
    )  # fmt: skip
    for row, (_, numbers) in enumerate(values):
        plot.line([numbers.min(), numbers.max()], [row, row], style.GREY, width=3)
        plot.dots(numbers, [row] * len(numbers), style.COLOURS[0], "run")
        if len(numbers) > 1:
            plot.dots([numbers.mean()], [row], style.COLOURS[1], "mean", radius=5)
    return plot.image()


def over_field(comparison: Comparison) -> dict[str, Image.Image]:
    """For each varied field of numbers: the metric over it, a curve for each setting of the others. No curve
    where other fields change with it: dots alone, and the axis names them.
    """
    plots, (words, scale) = {}, metric_in_words(comparison.metric)
    for name in comparison.varied:
        groups = [g for g in comparison.groups if name in g.setting and len(g.values())]
        numbers = [as_number(name, group.setting[name]) for group in groups]
        axis = axis_in_words(name, (group.setting[name] for group in groups))
        if axis is None or None in numbers or len(set(numbers)) < 2:
            continue
        lines: dict[str, list[tuple[float, Group]]] = {}
        for number, group in zip(numbers, groups, strict=True):
            others = {n: v for n, v in group.setting.items() if n != name}
            lines.setdefault(in_short(others), []).append((number, group))
        if len(lines) > _MOST:
            continue
        logarithmic = min(numbers) > 0 and max(numbers) / min(numbers) >= 10
        varied_too = [in_words(other) for other in comparison.together.get(name, ())]
        field = axis + (f", and with it {', '.join(varied_too)}" if varied_too else "")
        what = "a dot for each run" if varied_too else "mean and range over seeds"
        plot = Plot(
            f"{_title(words)} over {axis.partition(' [')[0]}: {what}",
            x=field, y=words, logarithmic=logarithmic,
        )  # fmt: skip
        for (label, line), colour in zip(lines.items(), style.COLOURS, strict=False):
            xs = [number for number, _ in line]
            if not varied_too:
                spread = [group.summary() for _, group in line]
                low, mean, high = ([scale * s[k] for s in spread] for k in ("low", "mean", "high"))
                plot.band(xs, low, high, colour)
                plot.line(xs, mean, colour, label)
            for number, group in line:
                values = scale * group.values()
                plot.dots([number] * len(values), values, colour, label if varied_too else "")
        plots[name] = plot.image()
    return plots


def curves(
    comparison: Comparison,
    name: str,
    title: str,
    unit: str,
    scale: float = 1.0,
    *,
    followed: bool = False,
) -> Image.Image | None:
    """A metric, times `scale`, over the steps: of each setting the mean of its runs and their range, as far as all of
    them have come; of more settings than there are colours, every run alone.

    Args:
      followed: whether it is one of `Run.followed`.
    """

    def all_of(run: Run) -> dict:
        return run.followed if followed else run.curves

    if all(len(all_of(run)[name][0]) < 2 for run in comparison.runs if name in all_of(run)):
        return None  # points alone are no curves; the table has them
    marked = followed or name.startswith("eval/")  # Nothing is known between two evaluations.
    plot, drawn = Plot(title, x="step", y=unit), 0
    groups = [
        (group, [run for run in group.runs if name in all_of(run)]) for group in comparison.groups
    ]
    groups = [(group, runs) for group, runs in groups if runs]
    for number, (group, runs) in enumerate(groups):
        colour = style.COLOURS[number % _MOST]
        label = group.label if len(groups) <= _MOST else ""
        steps, values = _together([all_of(run)[name] for run in runs])
        values = scale * values
        if len(steps):
            if len(runs) > 1:
                plot.band(steps, values.min(0), values.max(0), colour)
            plot.line(steps, values.mean(0), colour, label, marked=marked)
            drawn += 1
        for run in runs:  # the rest of those that continued for longer
            xs, ys = all_of(run)[name][0], scale * all_of(run)[name][1]
            rest = xs >= steps[-1] if len(steps) else np.ones(len(xs), bool)
            if rest.sum() > 1:
                plot.line(xs[rest], ys[rest], colour, label, width=1, marked=marked)
                drawn += 1
            if run.state in ("diverged", "unfinished"):
                finite = np.flatnonzero(np.isfinite(ys))
                if len(finite):
                    plot.note(xs[finite[-1]], ys[finite[-1]], run.state, colour)
    return plot.image() if drawn else None


def over_compute(comparison: Comparison) -> Image.Image | None:
    """The metric over all operations of a run (ViT Fig. 5); of more settings than there are colours with the
    numbers of their rows in the table.
    """
    points = [
        (group, [run for run in group.runs if np.isfinite(run.value) and np.isfinite(run.exaflops)])
        for group in comparison.groups
    ]
    points = [(group, runs) for group, runs in points if runs]
    amounts = [run.exaflops for _, runs in points for run in runs]
    if len(points) < 2 or max(amounts) / max(min(amounts), 1e-30) < 1.2:
        return None
    words, scale = metric_in_words(comparison.metric)
    prefix, power = next(
        (
            prefix_and_power
            for prefix_and_power in _PREFIXES
            if max(amounts) >= 10.0 ** (prefix_and_power[1] - 18)
        ),
        _PREFIXES[-1],
    )
    many = len(points) > _MOST
    plot = Plot(
        f"{_title(words)} over what training cost" + (", by the table's row" if many else ""),
        x=f"{prefix}FLOPs (10^{power} operations, a multiply-add counted as 2)", y=words,
        logarithmic=min(amounts) > 0,
    )  # fmt: skip
    for number, (group, runs) in enumerate(points):
        colour = style.COLOURS[number % _MOST]
        xs = [run.exaflops * 10.0 ** (18 - power) for run in runs]
        ys = [scale * run.value for run in runs]
        plot.dots(xs, ys, colour, "" if many else group.label)
        if many:
            row = str(1 + comparison.groups.index(group))
            plot.note(float(np.mean(xs)), float(np.mean(ys)), row, colour)
    return plot.image()


def by_dimension(comparison: Comparison) -> Image.Image | None:
    """The metric over compute, a curve for each size of the model that is scaled away from a common centre
    (ViT Fig. 8); `None` unless two sizes are.
    """
    groups = [g for g in comparison.groups if len(g.values()) and np.isfinite(g.runs[0].exaflops)]
    sizes = [name for name in comparison.varied if name.startswith("model.")]
    sizes = [n for n in sizes if all(as_number(n, g.setting.get(n)) is not None for g in groups)]
    if len(groups) < 3 or len(sizes) < 2 or sizes != comparison.varied:
        return None
    values = {n: [g.setting[n] for g in groups] for n in sizes}
    usual = {
        name: max(sizes_of_groups, key=sizes_of_groups.count)
        for name, sizes_of_groups in values.items()
    }
    centre = next((g for g in groups if g.setting == usual), None)
    lines: dict[str, list[Group]] = {}
    for group in groups if centre else ():
        scaled = [
            in_words(name).partition(" [")[0]
            for name in sizes
            if group.setting[name] != usual[name]
        ]
        if scaled:
            lines.setdefault(", ".join(scaled), [centre]).append(group)
    if len(lines) < 2 or len(lines) > _MOST:
        return None
    words, scale = metric_in_words(comparison.metric)
    plot = Plot(
        f"{_title(words)} over compute, by what is scaled",
        x="exaFLOPs of a run",
        y=words,
        logarithmic=True,
    )
    for (label, line), colour in zip(lines.items(), style.COLOURS, strict=False):
        line.sort(key=lambda group: group.runs[0].exaflops)
        xs = [group.runs[0].exaflops for group in line]
        plot.line(xs, [scale * group.summary()["mean"] for group in line], colour, label)
        for x, group in zip(xs, line, strict=True):
            plot.dots([x] * len(group.values()), scale * group.values(), colour)
    plot.note(centre.runs[0].exaflops, scale * centre.summary()["mean"], "centre", style.GREY)
    return plot.image()


def _title(words: str) -> str:
    """A metric at the beginning of a title, without its unit."""
    words = words.partition(" [")[0]
    return words[:1].upper() + words[1:]


def _together(curves: list[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """The steps at which all of several runs have a value, and their values there: (n,), (runs, n)."""
    common = functools.reduce(np.intersect1d, (steps for steps, _ in curves))
    values = np.array([values[np.isin(steps, common)] for steps, values in curves])
    return common, values.reshape(len(curves), len(common))
