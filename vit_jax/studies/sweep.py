"""Many runs: those of an experiment, one after the other; or those of one config: a grid of settings,
of which held-out training examples choose one, and that one again on all training examples, with
several seeds.

Each is an ordinary run in a folder of its own, which resumes by itself. What one run does is in
`loop.py`.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Mapping, Sequence

import jax
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from vit_jax import evaluation
from vit_jax.base import logs, places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest, walk
from vit_jax.base.settings import folder_name, with_fields
from vit_jax.checkpoints import reading, storage
from vit_jax.config import config_class
from vit_jax.data import sources, splits
from vit_jax.evaluation.metric_order import MetricOrder
from vit_jax.training.assembly import resolve
from vit_jax.training.guards import changed_fields
from vit_jax.training.loop import train
from vit_jax.training.upkeep.health import NonFiniteError
from vit_jax.training.upkeep.preemption import Interrupted, StopRequest
from vit_jax.training.with_data import assembly_for, subject_of

# The fields that a sweep sets in its runs, or compares them by, and what to set instead.
_NOT_IN_A_GRID = {
    "data.train_split": "set the examples to choose by with --select",
    "data.eval_split": "set the examples to choose by with --select",
    "seed": "the best setting is repeated with --seeds seeds from --config.seed on",
    "eval.best": "all settings are compared by one metric: set --config.eval.best",
    "eval.evaluators": "all settings are compared by one metric: set --config.eval.evaluators",
    "eval.patience": "the last runs are not ended early: set --config.eval.patience for all settings",
    "eval.target": "the last runs are not ended early: set --config.eval.target for all settings",
}
# Examples that a run is judged on in the end must not say when it ends.
_NOT_ENDED_EARLY = {"eval.patience": 0, "eval.target": None}


def sweep(
    config: ConfigDict,
    workdir: epath.PathLike,
    grid: Mapping[str, Sequence],
    *,
    select: str = "",
    seeds: int = 3,
) -> dict:
    """Chooses a setting as papers do, and says how good it is:

    1. every setting of the grid is trained without the examples `select`, in WORKDIR/select/SETTING;
    2. the one with the best `config.eval.best` on `select` wins, of equal ones that with the lower
       loss; one whose loss ceased to be finite, or whose metric is not a number, cannot;
    3. it is trained on all examples, `select` included, with `seeds` seeds from `config.seed` on, in
       WORKDIR/final/seed_SEED, and evaluated on `config.data.eval_split`, which ends none of these runs early.

    With `config.eval.patience` a setting is judged by its best evaluation, else by its last.

    Started again, it continues: runs that have ended are not repeated.

    Args:
      config: of all runs; only what is listed here changes.
      workdir: a folder for all of them; `sweep.json` in it holds what is returned.
      grid: values by the dotted name of a field, e.g. `{"optim.lr": [0.003, 0.01]}`; of several
        fields every combination is tried.
      select: slice of, or term in, `config.data.train_split`; by default what that leaves out of
        its split.
      seeds: how many final runs.

    Returns:
      `train`, `select`, `all`: the splits; `metrics`: those that are compared, the best and, if it
      is another, the loss; `settings`: each with these on `select`
      (`None` where it diverged); `chosen`: its fields; `seeds`: the last evaluation of each;
      of each metric `mean` and `std` over seeds (n - 1; `None` of a single seed).

    Raises:
      ConfigError: before anything is trained, for a grid or split that makes no sense.
      NonFiniteError: no setting of the grid survived.
    """
    logs.to_stderr_by_default()
    workdir = storage.locate_to_save(workdir, "--workdir")
    part, select, whole = divide(config.data.train_split, select)
    settings = _settings(config, grid)
    held_out = {"data.train_split": part, "data.eval_split": select}
    name, first = next(iter(settings.items()))
    order = _metric_order_of(with_fields(config, first | held_out), workdir / "select" / name)
    logging.info("settings are compared by %s", order.text())
    tried = []
    for number, (name, setting) in enumerate(settings.items(), start=1):
        logging.info(
            "setting %d of %d, %s: trained on %s, judged on %s; then %d runs of the best one",
            number, len(settings), name, part, select, seeds,
        )  # fmt: skip
        run = with_fields(config, setting | held_out)
        try:
            result = _judged(result_of(run, workdir / "select" / name), order, config)
        except NonFiniteError as error:
            logging.warning("%s: %s", name, error)
            result = {}
        tried.append((setting, result))
    survived = [trial for trial in tried if trial[1]]
    if not survived:
        raise NonFiniteError(f"the loss of every setting in {workdir}/select ceased to be finite")
    best = order.metric
    metrics = list(dict.fromkeys((best, *(["loss"] if "loss" in survived[0][1] else []))))
    chosen = choose_setting(tried, order)
    final = []
    for number, seed in enumerate(range(config.seed, config.seed + seeds), start=1):
        logging.info(
            "run %d of %d of the best setting, %s: seed %d, trained on %s",
            number, seeds, folder_name(chosen), seed, whole,
        )  # fmt: skip
        last = {"data.train_split": whole, "seed": seed, **_NOT_ENDED_EARLY}
        run = with_fields(config, chosen | last)
        final.append({"seed": seed, **result_of(run, workdir / "final" / f"seed_{seed}")})
    summary = {
        "train": part, "select": select, "all": whole, "metrics": metrics,
        "settings": [{"setting": s} | {name: r.get(name) for name in metrics} for s, r in tried],
        "chosen": chosen, "seeds": final,
        **{name: _spread([trial[name] for trial in final]) for name in metrics},
    }  # fmt: skip
    if jax.process_index() == 0:
        places.write_whole(workdir / "sweep.json", places.json_text(summary, indent=1) + "\n")
    return summary


def _judged(result: dict, order: MetricOrder, config: ConfigDict) -> dict:
    """The result of a setting with the value by which it is judged."""
    best = result.get("best")
    if not config.eval.patience or not best or best["metric"] != order.metric:
        return result
    return result | {order.metric: best["value"]}


def choose_setting(tried: Sequence[tuple[dict, dict[str, float]]], order: MetricOrder) -> dict:
    """The setting that wins.

    Args:
      tried: each setting with its metrics; {} where it diverged.

    Raises:
      NonFiniteError: the metric of none is a number.
    """
    known = [
        (setting, result)
        for setting, result in tried
        if result and not math.isnan(order.of(result))
    ]
    if not known:
        raise NonFiniteError(f"{order.metric} of every setting is not a number")

    def quality(trial: tuple[dict, dict[str, float]]) -> tuple[float, float]:
        _, result = trial
        loss = MetricOrder("loss", "min").score(result.get("loss", 0.0))
        return order.score(order.of(result)), loss

    return max(known, key=quality)[0]


def _metric_order_of(config: ConfigDict, workdir: epath.Path) -> MetricOrder:
    """By what the settings are compared. Raises `ConfigError` where a run would, or if that is not known."""
    run = resolve(config, workdir)
    source = sources.open_train(run.data)
    subject = subject_of(assembly_for(run, source), source)
    suite = evaluation.make(run.eval.evaluators, subject)
    return suite.metric_order(run.eval.best)


def divide(train_split: str, select: str = "") -> tuple[str, str, str]:
    """What to train on, what to choose by, and both together.

    >>> divide("train[:98%]")
    ('train[:98%]', 'train[98%:]', 'train')

    Args:
      train_split: a split, a slice of one, or a sum.
      select: a slice of the split, or a term of the sum; by default what the slice leaves out.

    Raises:
      ConfigError: nothing is held out, or `select` is no part of the split.
    """
    train_split, select = train_split.replace(" ", ""), select.replace(" ", "")
    split, terms = train_split.split("[")[0], train_split.split("+")
    if not select:
        select = splits.rest(train_split)
        if not select:
            raise ConfigError(
                f"config.data.train_split = {train_split!r} leaves no examples to choose by: set "
                "them with --select, e.g. --select=train[90%:]"
            )
        return train_split, select, split
    if len(terms) > 1 and select in terms:
        return "+".join(term for term in terms if term != select), select, train_split
    if len(terms) == 1 and select.split("[")[0] == split and splits.rest(select):
        return splits.rest(select), select, split
    raise ConfigError(
        f"--select={select} is neither a slice of config.data.train_split = {train_split!r} nor one "
        "of several splits in it"
    )


def text(summary: dict) -> str:
    """What `sweep` returned, for people."""
    metrics = summary["metrics"]
    names = " and ".join(metrics)
    rows = [
        f"  {folder_name(row['setting']):<40} "
        + ("diverged" if row[metrics[0]] is None else _figures(row, metrics))
        + ("  chosen" if row["setting"] == summary["chosen"] else "")
        for row in summary["settings"]
    ]
    rows = [f"{names} on {summary['select']}, trained on {summary['train']}:", *rows]
    rows += [f"{names}, trained on {summary['all']}:"]
    rows += [
        f"  {'seed ' + str(row['seed']):<40} {_figures(row, metrics)}" for row in summary["seeds"]
    ]
    best, n = summary[metrics[0]], len(summary["seeds"])
    spread = "" if best["std"] is None else f" ± {best['std']:.4f}"
    return "\n".join([*rows, f"{metrics[0]} {best['mean']:.4f}{spread} (n = {n})"])


def _figures(result: dict, metrics: list[str]) -> str:
    return "  ".join(f"{result[name]:.4f}" for name in metrics)


def _settings(config: ConfigDict, grid: Mapping[str, Sequence]) -> dict[str, dict]:
    """Every combination of the grid by its name, which is that of its folder."""
    known = [name for name, _ in walk(config_class())]
    for field in grid:
        if field not in known:
            raise ConfigError(f"--grid: config has no field {field}{nearest(field, known)}")
        if field in _NOT_IN_A_GRID:
            raise ConfigError(
                f"--grid={field}: a sweep sets this field itself: {_NOT_IN_A_GRID[field]}"
            )
    points = [dict(zip(grid, point, strict=True)) for point in itertools.product(*grid.values())]
    settings = {folder_name(point): point for point in points}
    if not grid or len(settings) < len(points) or not points:
        raise ConfigError(
            f"--grid: {dict(grid)} has no or the same settings twice; e.g. --grid=optim.lr=0.003,0.01"
        )
    try:
        for point in points:
            with_fields(config, point)
    except ConfigError as error:
        raise ConfigError(f"--grid: {error}") from error
    return settings


def run_all(runs: Mapping[str, ConfigDict], workdir: epath.PathLike) -> dict[str, dict]:
    """Trains every run of an experiment in WORKDIR/NAME, and continues where it was stopped. A run whose
    `config.pseudo.teacher` is the name of another learns from what that one says; one whose `config.init_from` is
    starts from its last weights: a further stage of a recipe.

    Returns:
      The result of each by its name; {} of one whose loss ceased to be finite.

    Raises:
      ConfigError: a run cannot be trained as it is.
      NonFiniteError: that of a run which another starts from or learns from.
    """
    logs.to_stderr_by_default()
    workdir, results = storage.locate_to_save(workdir, "--workdir"), {}
    _check_stages(runs)
    for number, (name, config) in enumerate(runs.items(), start=1):
        logging.info("run %d of %d: %s", number, len(runs), name)
        earlier = {field: value for field, value in _earlier(config).items() if value in runs}
        config = with_fields(config, {field: str(workdir / run) for field, run in earlier.items()})
        try:
            results[name] = result_of(config, workdir / name)
        except NonFiniteError as error:
            if any(name in _earlier(other).values() for other in runs.values()):
                raise
            logging.warning("%s: %s", name, error)
            results[name] = {}
    return results


def _check_stages(runs: Mapping[str, ConfigDict]) -> None:
    """Raises `ConfigError` for a later stage that could not be trained, before the first is."""
    for name, config in runs.items():
        # Where the model's name is left open, it is that of weights which are not there yet.
        if config.init_from in runs and config.model.name:
            try:
                resolve(with_fields(config, {"init_from": ""}))
            except ConfigError as error:
                raise ConfigError(f"run {name!r}: {error}") from error


def _earlier(config: ConfigDict) -> dict[str, str]:
    """The fields of a run that may name an earlier run of its experiment."""
    return {"init_from": config.init_from, "pseudo.teacher": config.pseudo.teacher}


def result_of(config: ConfigDict, workdir: epath.Path) -> dict[str, float]:
    """The result of a run, trained now or before.

    Raises:
      Interrupted: a signal came. If it came at the last step of this run, the next run does not begin.
    """
    ended = places.read_json(workdir / "result.json")
    if ended is None:
        requests_before = StopRequest.requests
        result = train(config, workdir)
        if StopRequest.requests > requests_before:
            raise Interrupted(
                f"stopped by a signal: the run in {workdir} has ended; start again to continue with the next one"
            )
        return result
    logging.info("%s: this run has ended, it is not repeated", workdir)
    saved = reading.newest_description(workdir)
    now = dataclasses.asdict(resolve(config, workdir))
    changed = changed_fields(saved, {**saved, "config": now})
    old, new = saved["config"]["data"], now["data"]
    # A run may be evaluated in another way; one that is not repeated cannot.
    evaluated = ("eval_split", "eval_crop", "eval_resize")
    changed += [f"config.data.{n}: {old[n]!r} -> {new[n]!r}" for n in evaluated if old[n] != new[n]]
    if changed:
        raise ConfigError(
            f"{workdir} holds a run with another config, in {'; '.join(changed)}. Use another --workdir"
        )
    # A metric that is not finite is null in the file; `best` and `reached` may be missing.
    missing = [name for name, value in ended.items() if value is None]
    metrics = [name for name in missing if name not in ("best", "reached")]
    return ended | dict.fromkeys(metrics, math.nan)


def _spread(values: list[float]) -> dict[str, float | None]:
    std = None
    if len(values) > 1:
        std = statistics.stdev(values) if all(map(math.isfinite, values)) else math.nan
    return {"mean": math.fsum(values) / len(values), "std": std}
