"""VTAB-1k: one model fine-tuned on 19 tasks of 1,000 examples each, and the mean of their accuracies (arXiv
1910.04867).
"""

import json
import statistics
from collections.abc import Callable, Sequence

import jax
from absl import logging
from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import storage
from vit_jax.data.record import DataAbsent
from vit_jax.data.sources.known_sets import VTAB
from vit_jax.studies.sweep import sweep

# VTAB's groups are in the order of `known_sets.VTAB`.
GROUPS = {"natural": VTAB[:7], "specialized": VTAB[7:11], "structured": VTAB[11:]}
# ViT §B.1.1 chooses for every task among these.
RATES = (0.001, 0.003, 0.01, 0.03)


def vtab(
    config_of: Callable[[str], ConfigDict],
    workdir: epath.PathLike,
    *,
    rates: Sequence[float] = RATES,
    seeds: int = 1,
) -> dict:
    """Of every task the learning rate is chosen by its 200 validation examples, after training on the other 800;
    then it is trained on all 1,000 and judged on the whole test set, in WORKDIR/TASK. Started again, it continues.

    Args:
      config_of: the config of a task by its name.
      rates: learning rates to choose from.
      seeds: how many final runs of each task.

    Returns:
      `tasks`: of each its `accuracy`, mean over seeds, and `lr`; `absent`: why a task could not be run, those whose
      data is not there; `groups`: the mean of each group that is complete; `mean`: of all 19 tasks, `None` if some
      are absent. Also in WORKDIR/vtab.json.

    Raises:
      ConfigError: no task's data is there.
    """
    workdir, results, absent = storage.locate_to_save(workdir, "--workdir"), {}, {}
    for number, task in enumerate(VTAB, start=1):
        logging.info("task %d of %d: %s", number, len(VTAB), task)
        place = workdir / task.partition("/")[2]
        try:
            result = sweep(
                config_of(task), place, {"optim.lr": list(rates)}, select="val200", seeds=seeds
            )
        except DataAbsent as error:
            logging.warning("%s is skipped: %s", task, error)
            absent[task] = str(error)
            continue
        accuracy, lr = result["accuracy"]["mean"], result["chosen"]["optim.lr"]
        results[task] = {"accuracy": accuracy, "lr": lr}
    if not results:
        raise ConfigError(f"no task of VTAB is there: {next(iter(absent.values()))}")
    summary = {
        "tasks": results,
        "absent": absent,
        "groups": {name: _mean(results, tasks) for name, tasks in GROUPS.items()},
        "mean": _mean(results, VTAB),
    }
    if jax.process_index() == 0:
        places.write_whole(workdir / "vtab.json", json.dumps(summary, indent=1) + "\n")
    return summary


def text(summary: dict) -> str:
    """What `vtab` returned, as Markdown."""
    lines = ["| task | accuracy % | rate |", "|---|---|---|"]
    for name, tasks in GROUPS.items():
        for task in tasks:
            result = summary["tasks"].get(task)
            figures = (
                f"{100 * result['accuracy']:.1f} | {result['lr']:g}" if result else "absent | "
            )
            lines.append(f"| {task.partition('/')[2]} | {figures} |")
        lines.append(f"| **{name}** | {_percent(summary['groups'][name])} | |")
    lines.append(f"| **mean of {len(VTAB)}** | {_percent(summary['mean'])} | |")
    return "\n".join(lines)


def _mean(results: dict, tasks: Sequence[str]) -> float | None:
    """VTAB counts all tasks alike; `None` if one is missing."""
    if not results.keys() >= set(tasks):
        return None
    return statistics.fmean(results[task]["accuracy"] for task in tasks)


def _percent(value: float | None) -> str:
    return "incomplete" if value is None else f"{100 * value:.1f}"
