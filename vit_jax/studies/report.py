"""What `vit_jax report` does: a table and pictures of runs, as Markdown, PNG files and one page."""

import functools
import json
import math
import re
from collections.abc import Callable, Sequence

import numpy as np
from etils import epath
from PIL import Image

from vit_jax.base import outputs, places
from vit_jax.base.errors import ConfigError
from vit_jax.evaluation import declared_direction
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.pictures.page import Page, markdown, png
from vit_jax.studies import compare, figures, judged, references, runs, saturation
from vit_jax.studies.compare import Comparison

# Of all that runs log: what is drawn over the steps, and its axis.
_CURVES = {
    "loss": ("Training loss", "loss"),
    "images_per_second": ("Speed", "images/s"),
    "goodput": ("Goodput: the share of time that went into training steps", "share of time [%]"),
    "learning_rate": ("Learning rate", "learning rate"),
}


_FOLLOWED_HEAD = "Evaluated beside the runs"
_FOLLOWED_FIELDS = ("run", "evaluation", "step", "value", "best", "best_step")


def report(
    folders: Sequence[epath.PathLike],
    out: epath.PathLike,
    *,
    title: str = "",
    add: Callable[[Page], None] | None = None,
) -> dict:
    """Writes OUT/report.html, `report.md`, `report.json` and the pictures. The page of a single run that `judged.judge`
    has measured begins with what that found.

    Args:
      folders: runs, sweeps, or folders of several.
      out: a folder, made if it is not there.
      title: of the page.
      add: appends further sections to the page, before the curves.

    Returns:
      `report`, `metric`, `varied`, `settings` (each with its `setting`, runs, `mean`, `low`, `high`,
      `std`, `n`, `states`) and `notes`.

    Raises:
      ConfigError: there is no run, or the folder cannot be made.
    """
    out = places.locate(out, "--out")
    comparison = compare.compare(runs.find_runs(folders))
    if runs.is_run(places.locate(out)):
        raise ConfigError(f"--out={out} is a run's workdir: name another folder, e.g. {out}/report")
    out = outputs.make_folder(out, "--out")
    pictures = _pictures(comparison)
    for name, (_, image) in pictures.items():
        (out / f"{name}.png").write_bytes(png(image))
    result = {
        "report": str(out / "report.html"),
        "metric": comparison.metric,
        "varied": comparison.varied,
        "settings": [
            {"setting": group.setting, "runs": [run.name for run in group.runs], **group.summary()}
            for group in comparison.groups
        ],
        "notes": comparison.notes,
    }
    if followed := _followed(comparison):
        result["beside"] = [dict(zip(_FOLLOWED_FIELDS, row, strict=True)) for row in followed]
    places.write_whole(out / "report.json", json.dumps(result, indent=1) + "\n")
    places.write_whole(out / "report.md", _markdown(comparison, pictures))
    page = Page(title or _title(comparison))
    if len(comparison.runs) == 1 and len(folders) == 1 and judged.is_judged(folders[0]):
        judged.add_to_page(page, folders[0])
    if add:
        add(page)
    _add_comparison(page, comparison, pictures)
    places.write_whole(out / "report.html", page.html())
    return result


def text(result: dict) -> str:
    """`report`'s result for a person."""
    lines = [f"note: {note}" for note in result["notes"]]
    for row in result["settings"]:
        setting = ", ".join(f"{name}={compare.value_text(v)}" for name, v in row["setting"].items())
        metric, of = result["metric"], functools.partial(compare.metric_value, result["metric"])
        mean = "not evaluated" if row["mean"] is None else f"{metric} {of(row['mean'])}"
        low = "" if row["low"] is None else of(row["low"]).removesuffix(" %")
        spread = f" ({low} … {of(row['high'])})" if row["n"] > 1 else ""
        states = ", ".join(f"{count} {state}" for state, count in row["states"].items())
        lines.append(f"{setting or 'all'}: {mean}{spread}, {states}")
    return "\n".join([*lines, "", f"report: {result['report']}"])


def _pictures(comparison: Comparison) -> dict[str, tuple[str, Image.Image]]:
    """By the name of the file: a heading, and the picture."""
    pictures = {
        "steps_to_target": ("Steps to the target", figures.steps_to_target(comparison)),
        "by_setting": ("By setting", _by_setting(comparison)),
    }
    for name, image in figures.over_field(comparison).items():
        pictures[f"over_{name.replace('.', '_')}"] = (f"Over {compare.in_words(name)}", image)
    pictures["over_compute"] = ("Over compute", figures.over_compute(comparison))
    pictures["by_dimension"] = ("By what is scaled", figures.by_dimension(comparison))
    names = dict.fromkeys(name for run in comparison.runs for name in run.curves)
    judged = (f"eval/{comparison.metric}", compare.loss_of_evaluations(names))
    curves = {
        name: (
            f"{short.capitalize().replace('_', ' ')} of evaluations",
            compare.metric_in_words(short)[0],
        )
        for name in judged
        if name in names and (short := name.removeprefix("eval/"))
    } | _CURVES
    for name, (title, unit) in curves.items():
        scale = compare.metric_in_words(name)[1]
        image = figures.curves(comparison, name, title, unit, scale)
        pictures[f"curve_{name.replace('/', '_')}"] = (title, image)
    for number, (name, image) in enumerate(references.pictures(comparison).items()):
        pictures[f"reference_{number}"] = (f"Beside the reference curve {name}", image)
    for name in dict.fromkeys(row[1] for row in _followed(comparison)):
        words, scale = compare.metric_in_words(name.partition(": ")[2])
        image = figures.curves(comparison, name, name, words, scale, followed=True)
        pictures[f"beside_{re.sub(r'[^a-zA-Z0-9]+', '_', name)}"] = (
            f"Beside the run, {name}",
            image,
        )
    return {name: (head, image) for name, (head, image) in pictures.items() if image is not None}


def _by_setting(comparison: Comparison) -> Image.Image | None:
    """None of a single run, which would be a single dot."""
    return figures.by_setting(comparison) if len(comparison.runs) > 1 else None


def _summary(comparison: Comparison) -> list[str]:
    """Sentences above the table."""
    count, groups = len(comparison.runs), len(comparison.groups)
    if not comparison.varied:
        first = (
            f"{count} runs, which differ in nothing but their seeds." if count > 1 else "One run."
        )
    else:
        varied = ", ".join(map(compare.in_words, comparison.varied))
        first = f"{count} runs of {groups} settings; varied: {varied}."
    lines = [first]
    for name, others in comparison.together.items():
        few = [other for other in others if name != "model.name" or not other.startswith("model.")]
        few += ["options of the model"] if len(few) < len(others) else []
        few = [compare.in_words(other) for other in few]
        verb = "changes" if len(few) == 1 else "change"
        lines.append(f"Together with {compare.in_words(name)} {verb} {', '.join(few)}.")
    if comparison.metric and count > 1:
        lines.append(
            f"{comparison.metric} is that of the last evaluation; means, ranges and standard deviations "
            "(n - 1) are over the seeds of runs that are done, or, where none is, of all."
        )
    return lines


def _title(comparison: Comparison) -> str:
    runs_compared = comparison.runs
    return f"The run {runs_compared[0].name}" if len(runs_compared) == 1 else "How the runs compare"


def _add_comparison(page: Page, comparison: Comparison, pictures: dict) -> None:
    page.heading("Table")
    for line in _summary(comparison):
        page.text(line)
    page.table(compare.rows(comparison))
    for head, image in pictures.values():
        page.heading(head)
        page.picture(image, head)
    page.heading("Runs")
    page.table(_runs(comparison))
    for head, table in _further_tables(comparison).items():
        page.heading(head)
        page.table(table)
    if comparison.notes:
        page.heading("Notes")
        for note in comparison.notes:
            page.text(note)


def _markdown(comparison: Comparison, pictures: dict) -> str:
    parts = [f"# {_title(comparison)}", *_summary(comparison), markdown(compare.rows(comparison))]
    parts += [f"![{head}]({name}.png)" for name, (head, _) in pictures.items()]
    parts += ["## Runs", markdown(_runs(comparison))]
    for head, table in _further_tables(comparison).items():
        parts += [f"## {head}", markdown(table)]
    parts += [f"- {note}" for note in comparison.notes]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def _further_tables(comparison: Comparison) -> dict[str, list[list[str]]]:
    tables = {
        _FOLLOWED_HEAD: _followed_table(comparison),
        "Beside reference curves": references.rows(comparison),
        "Wrong answers against compute, with saturation": saturation.law_rows(comparison),
    }
    return {head: table for head, table in tables.items() if table}


def _runs(comparison: Comparison) -> list[list[str]]:
    """Every run and where its time went."""
    kinds = dict.fromkeys(kind for run in comparison.runs for kind in run.shares)
    table = [["run", "state", "step", comparison.metric or "metric", *kinds]]
    for run in comparison.runs:
        known = math.isfinite(run.value)
        value = compare.metric_value(comparison.metric, run.value) if known else "-"
        shares = [f"{run.shares[kind]:.1%}" if kind in run.shares else "-" for kind in kinds]
        table.append([run.name, run.state, f"{run.step:,}", value, *shares])
    return table


def _followed(comparison: Comparison) -> list[tuple]:
    """Of each run, what `evaluate --follow` found, in the order of `_FOLLOWED_FIELDS`: the first metric of each data
    set, at the last step and at its best.
    """
    rows = []
    for run in comparison.runs:
        first: dict[str, str] = {}
        for name in run.followed:
            series, _, metric = name.partition(": ")
            first.setdefault(f"{series}: {metric.rpartition('/')[0]}", name)
        for name in first.values():
            steps, values = run.followed[name]
            if not np.isfinite(values).any():
                continue
            metric = name.partition(": ")[2]
            direction = declared_direction(metric)
            # Of a metric of an own evaluator the last is shown, for nothing says which is the best.
            best = len(values) - 1
            if direction:
                best = int(np.argmax([MetricOrder(metric, direction).score(v) for v in values]))
            rows.append(
                (
                    run.name,
                    name,
                    int(steps[-1]),
                    float(values[-1]),
                    float(values[best]),
                    int(steps[best]),
                )
            )
    return rows


def _followed_table(comparison: Comparison) -> list[list[str]]:
    rows = _followed(comparison)
    if not rows:
        return []
    texts = []
    for run, name, step, value, best, at in rows:
        of = functools.partial(compare.metric_value, name.partition(": ")[2])
        texts.append([run, name, f"{step:,}", of(value), of(best), f"{at:,}"])
    return [["run", "evaluation", "step", "value", "best", "at step"], *texts]
