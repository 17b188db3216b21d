"""What was varied between runs, and what came of it: plain data, no pictures."""

import dataclasses
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from vit_jax.evaluation import is_share
from vit_jax.studies.runs import Run

# Where, how often and on what a run is computed and kept makes it no other run.
_NO_DIFFERENCE = ("checkpoint.", "log.", "hosts.", "mesh.", "model.remat", "model.unroll")
_NO_DIFFERENCE += (
    "compilation_cache",
    "data.threads",
    "data.read_ahead",
    "data.prefetch",
    "data.mixed_decoders",
)
_NO_DIFFERENCE += ("eval.every", "eval.batch_size", "model.num_classes", "model.dtype_on_cpu")
SEED = "seed"
_SHARE = re.compile(r"\w+(\[:(?P<share>[\d.]+)%\])?")
_PART = re.compile(r"\w+\[(?P<start>\d+):(?P<stop>\d+)\]")  # of a split by numbers of images
# Of fields that always change together the one that says most; heads change with the width.
_SAY_MOST = ("model.name", "model.width")
# From these may follow the other fields of their sections.
_SAY_WHAT = ("model.name", "optim.name")
_OF_DATA = ("data.name", "data.path", "data.train_split", "data.eval_split", "data.mixture")


@dataclasses.dataclass
class Group:
    """Runs that differ in nothing but their seed.

    Attributes:
      setting: the value of every field that was varied.
      runs: at least one.
    """

    setting: dict
    runs: list[Run]

    @property
    def label(self) -> str:
        """The values in short."""
        alone = self.runs[0].name if len(self.runs) == 1 else "all runs"
        return in_short(self.setting) or alone

    def values(self) -> np.ndarray:
        """What its runs came to: those that ended, or, if none has, all."""
        done = [run.value for run in self.runs if run.state == "done"]
        values = np.array(done or [run.value for run in self.runs])
        return values[np.isfinite(values)]

    def steps_to_target(self) -> np.ndarray:
        """After how many steps each run that reached `eval.target` did."""
        return np.array([run.reached["step"] for run in self.runs if run.reached])

    def summary(self) -> dict:
        """`mean`, `low`, `high` over seeds, `std` (n - 1; `None` of one), `n`, `states`; `steps_to_target`, if any
        run has a target.
        """
        values, states = self.values(), [run.state for run in self.runs]
        statistics = dict.fromkeys(("mean", "low", "high", "std"))
        if any((run.config or {}).get("eval.target") is not None for run in self.runs):
            statistics["steps_to_target"] = self.steps_to_target().tolist()
        if len(values):
            statistics |= {
                "mean": math.fsum(values) / len(values),
                "low": float(values.min()),
                "high": float(values.max()),
            }
        if len(values) > 1:
            statistics["std"] = float(np.std(values, ddof=1))
        return statistics | {
            "n": len(values),
            "states": {s: states.count(s) for s in sorted(set(states))},
        }


@dataclasses.dataclass
class Comparison:
    """Runs side by side.

    Attributes:
      runs: all.
      varied: the fields in which they differ, the model's name first; of several that always change
        together the one that says most.
      together: by these, the others that change with them.
      groups: in the order of their settings.
      metric: what they are judged by.
      notes: what to mind, in sentences.
    """

    runs: list[Run]
    varied: list[str]
    together: dict[str, list[str]]
    groups: list[Group]
    metric: str
    notes: list[str]


def compare(runs: Sequence[Run]) -> Comparison:
    """Groups runs by what was varied between them."""
    known = [run for run in runs if run.config is not None]
    for run in known:
        if run.config.get("init_from"):
            run.config["init_from"] = _earlier_run(run.config["init_from"], runs)
    varied, together = _varied(known)
    groups: dict[str, Group] = {}
    for run in runs:
        setting = (
            {name: run.config.get(name) for name in varied} if run.config else {"run": run.name}
        )
        groups.setdefault(_key(setting), Group(setting, [])).runs.append(run)
    metrics = [run.metric for run in runs if run.metric]
    metric = max(dict.fromkeys(metrics), key=metrics.count) if metrics else ""
    ordered = sorted(groups.values(), key=lambda g: [_order(n, v) for n, v in g.setting.items()])
    notes = _notes(runs, known, metric)
    for run in runs:
        if run.metric not in ("", metric):
            run.value = run.last(f"eval/{metric}")
    return Comparison(list(runs), varied, together, ordered, metric, notes)


def _earlier_run(path: str, runs: Sequence[Run]) -> str:
    """The name of the run among those compared that a later stage starts from, in place of its path."""
    return next((run.name for run in runs if path.endswith(f"/{run.name}")), path)


def _varied(runs: Sequence[Run]) -> tuple[list[str], dict[str, list[str]]]:
    names = dict.fromkeys(name for run in runs for name in run.config)
    varied: dict[str, tuple] = {}
    for name in names:
        if name == SEED or name.startswith(_NO_DIFFERENCE):
            continue
        values = tuple(_key(run.config.get(name)) for run in runs)
        if len(set(values)) > 1:
            varied[name] = values
    # Fields that split the runs alike are one choice.
    first: dict[tuple, str] = {}
    together: dict[str, list[str]] = {}
    for name in sorted(varied, key=lambda name: name not in _SAY_MOST):
        values = varied[name]
        order = tuple(values.index(value) for value in values)
        if order in first:
            together[first[order]].append(name)
        else:
            first[order] = name
            together[name] = []
    kept = [name for name in varied if name in together]
    kept.sort(key=lambda name: name != "model.name")
    for head in _SAY_WHAT:
        section = head.removesuffix("name")
        for name in [n for n in kept if head in kept and n.startswith(section) and n != head]:
            if _follows(varied[head], varied[name]):
                kept.remove(name)
                together[head] += [name, *together.pop(name)]
    return kept, {name: others for name, others in together.items() if others}


def _follows(first: tuple, second: tuple) -> bool:
    """Whether the first tells the second."""
    return len(set(zip(first, second, strict=True))) == len(set(first))


def _notes(runs: Sequence[Run], known: Sequence[Run], metric: str) -> list[str]:
    notes = [f"{run.name}: {note}" for run in runs for note in run.notes]
    for name in _OF_DATA:
        of_runs = [run.config.get(name) for run in known]
        values = dict.fromkeys(value_text(v) if images_of(v) else _key(v) for v in of_runs)
        if len(values) > 1:
            notes.append(
                f"These runs are of different data: config.{name} is {', '.join(values)}. Their metrics "
                "compare as far as the data does."
            )
    others = sorted({run.metric for run in runs if run.metric not in ("", metric)})
    if others:
        notes.append(
            f"Some runs are judged by {', '.join(others)}; here all are compared by {metric}, where they "
            "have it."
        )
    return notes


def images_of(split: object) -> int | None:
    """How many images 'train[0:50]+train[100:150]' has, 100; `None` of splits that have other parts."""
    parts = [_PART.fullmatch(part) for part in str(split).split("+")]
    return sum(int(p["stop"]) - int(p["start"]) for p in parts) if all(parts) else None


def as_number(name: str, value: object) -> float | None:
    """The value of a field as a number, `None` if it is none; of 'train[:10%]' the share in percent, of
    'train[0:50]+train[100:150]' the images.
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if name != "data.train_split":
        return None
    images, share = images_of(value), _SHARE.fullmatch(value)
    return images or (float(share["share"] or 100) if share else None)


def loss_of_evaluations(names: Iterable[str]) -> str:
    """That curve among all of a run; '' if there is none."""
    return next((n for n in names if n.startswith("eval/") and n.endswith("loss")), "")


def in_short(setting: Mapping) -> str:
    """Fields and their values, without what goes without saying: 'ViT-S/16, lr 0.001'. Options that a
    model does not have, of `None`, are excluded, as are empty ones.
    """
    names = {"model.name": "", "run": "", "data.train_split": ""}
    given = {n: value for n, value in setting.items() if value not in (None, "", [])}
    words = {n: _VALUES.get(n, {}).get(str(v)) or value_text(v) for n, v in given.items()}
    parts = (f"{names.get(n, in_words(n))} {value}" for n, value in words.items())
    return ", ".join(part.strip() for part in parts)


# What figures and tables call fields; others by the last part of their name.
_WORDS = {
    "batch_size": "batch size", "data.image_size": "image size [px]", "data.path": "data",
    "data.train_split": "training images", "duration": "length", "init_from": "starting from",
    "model.mlp_dim": "MLP width", "model.name": "model", "model.patch": "patch size [px]", "optim.b1": "β1",
    "optim.b2": "β2", "optim.ema": "EMA decay", "optim.lr": "learning rate", "optim.name": "optimizer",
    "optim.clip": "gradient clipping", "model.pool": "pooling", "model.position": "positions",
}  # fmt: skip

# What figures call values whose names are those of an option.
_VALUES = {
    "model.position": {
        "learned": "learned in 1-D", "learned2d": "learned in 2-D", "sincos2d": "fixed sines in 2-D",
        "fixed2d": "table of fixed sines in 2-D", "factorized": "learned for rows and for columns",
    },
}  # fmt: skip


def in_words(field: str) -> str:
    """What a field of the config is called: 'learning rate'."""
    return _WORDS.get(field) or field.split(".")[-1].replace("_", " ")


def axis_in_words(field: str, values: Iterable) -> str | None:
    """What an axis of these values of a field is called; `None` if they have no common unit."""
    shares = {images_of(value) is None for value in values if field == "data.train_split"}
    if len(shares) > 1:
        return None
    return "share of training images [%]" if shares == {True} else in_words(field)


def metric_in_words(metric: str) -> tuple[str, float]:
    """What a metric is called along an axis, and what its values are multiplied by: ('accuracy [%]', 100)."""
    words = metric.replace("_", " ").replace("/", " ")
    return (f"{words} [%]", 100.0) if is_share(metric) else (words, 1.0)


def metric_value(metric: str, value: float) -> str:
    """A value of a metric as people write it: '98.61 %', '0.4312'."""
    return f"{100 * value:.2f} %" if is_share(metric) else f"{value:.4f}"


def value_text(value: object) -> str:
    """A value as people write it."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str) and "+" in value and images_of(value):
        return f"{images_of(value):,} images"
    return value if isinstance(value, str) else json.dumps(value)


def target(comparison: Comparison) -> str:
    """What runs were to reach: 'accuracy 42.00 %'; '' if none did, 'their targets' if these differ."""
    targets = {
        (run.reached["metric"], run.reached["target"]) for run in comparison.runs if run.reached
    }
    if len(targets) > 1:
        return "their targets"
    return "".join(f"{metric} {metric_value(metric, value)}" for metric, value in targets)


def rows(comparison: Comparison) -> list[list[str]]:
    """The table: a row for each setting, the first row names."""
    varied = [in_words(name) for name in comparison.varied]
    metric = comparison.metric
    reached = target(comparison)
    head = [*varied, *([f"steps to {reached}"] if reached else [])]
    head += ["runs", metric.replace("_", " ") or "metric", "range", "std", "step"]
    table = [[*head, "training loss", "loss", "images/s", "goodput", "exaFLOPs", "state"]]
    for group in comparison.groups:
        statistics = group.summary()
        fields = [
            value_text(group.setting[name]) for name in comparison.varied if name in group.setting
        ]
        if not comparison.varied or "run" in group.setting:
            fields = [group.label] + [""] * (len(comparison.varied) - 1)
        mean, low, high, std = (statistics[key] for key in ("mean", "low", "high", "std"))
        table.append([
            *fields,
            *([_steps(group)] if reached else []),
            str(len(group.runs)),
            "-" if mean is None else metric_value(metric, mean),
            f"{metric_value(metric, low).removesuffix(' %')} … {metric_value(metric, high)}"
            if statistics["n"] > 1
            else "-",
            "-" if std is None else metric_value(metric, std),
            _mean([run.step for run in group.runs], "{:,.0f}"),
            _mean([run.last("loss") for run in group.runs], "{:.3f}"),
            _mean([run.last(loss_of_evaluations(run.curves)) for run in group.runs], "{:.3f}"),
            _mean([run.median("images_per_second") for run in group.runs], "{:,.0f}"),
            _mean([run.last("goodput") for run in group.runs], "{:.0%}"),
            _mean([run.exaflops for run in group.runs], "{:.3g}"),
            ", ".join(f"{count} {state}" for state, count in statistics["states"].items()),
        ])  # fmt: skip
    if not comparison.varied:
        table[0].insert(0, "run")
    return table


def _steps(group: Group) -> str:
    """Mean and range of the steps to the target, and how many runs did not reach it: '450 (400 … 500), 1 did not'."""
    steps, missing = group.steps_to_target(), len(group.runs) - len(group.steps_to_target())
    parts = [_mean(steps, "{:,.0f}")] if len(steps) else []
    if len(steps) > 1:
        parts[0] += f" ({steps.min():,} … {steps.max():,})"
    return ", ".join(parts + [f"{missing} did not"] * bool(missing))


def _mean(values: Sequence[float], form: str) -> str:
    values = [value for value in values if math.isfinite(value)]
    return form.format(math.fsum(values) / len(values)) if values else "-"


def _key(value: object) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _order(name: str, value: object) -> tuple:
    number = as_number(name, value)
    return (1, 0.0, _key(value)) if number is None else (0, number, "")
