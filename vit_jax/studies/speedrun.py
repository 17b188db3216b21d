"""What `vit_jax report --speedrun` prints: runs that reached `config.eval.target`, by the time that they took
from the start of their process. The rules are in docs/speedrun.md.
"""

import shlex
from collections.abc import Sequence

from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.pictures.page import markdown
from vit_jax.studies import compare, runs
from vit_jax.studies.runs import Run

_NOT_COMPARED = ("--workdir", "--config.seed", "--config.data.path", "--config.compilation_cache")
_HEAD = ["seconds", "range", "seeds", "target", "reached", "hardware", "commit", "command"]


def rank(folders: Sequence[epath.PathLike]) -> dict:
    """Entries: runs of equal command, commit and hardware, which differ in their seeds.

    Args:
      folders: runs, or folders of several.

    Returns:
      `entries`, slowest first: `seconds` (the mean over seeds), `low`, `high`, `seeds`, `metric`, `target`, `value`
      (the mean), `hardware`, `commit`, `command`; `notes` on runs that are in none.

    Raises:
      ConfigError: no run has a target; see also `runs.find_runs`.
    """
    all_runs, notes, groups = runs.find_runs(folders), [], {}
    aimed = [run for run in all_runs if run.reached or (run.config or {}).get("eval.target")]
    if not aimed:
        raise ConfigError(
            "none of these runs has a target: train with --config.eval.target=0.6 --config.eval.every='1 epochs'"
        )
    for run in aimed:
        if problem := _problem(run):
            notes.append(f"{run.name} {problem}.")
        else:
            reached = run.reached
            key = (_compared(reached["command"]), reached["commit"], reached["hardware"])
            groups.setdefault((*key, reached["metric"], reached["target"]), []).append(run)
    entries = [_entry(*key, group) for key, group in groups.items()]
    return {"entries": sorted(entries, key=lambda entry: -entry["seconds"]), "notes": notes}


def text(result: dict) -> str:
    """`rank`'s result as Markdown."""
    table = [_HEAD]
    for entry in result["entries"]:
        target, value = (
            compare.metric_value(entry["metric"], entry[n]) for n in ("target", "value")
        )
        span = f"{entry['low']:.1f} … {entry['high']:.1f}"
        seeds = ", ".join(map(str, entry["seeds"]))
        where = [entry["hardware"], entry["commit"], f"`{entry['command']}`"]
        table.append(
            [f"{entry['seconds']:.1f}", span, seeds, f"{entry['metric']} {target}", value, *where]
        )
    return "\n".join([markdown(table), *(f"note: {note}" for note in result["notes"])])


def _problem(run: Run) -> str:
    """Why a run has no time; '' if it has."""
    if not run.reached:
        where = f"{run.metric} {compare.metric_value(run.metric, run.value)}" if run.metric else ""
        return f"has not reached its target ({run.state}{', ' if where else ''}{where})"
    if run.reached["restarted"]:
        return "was restarted, so that its time is not that of one process"
    return ""


def _entry(command: str, commit: str, hardware: str, metric: str, target: float, group) -> dict:
    seconds = [run.reached["seconds"] for run in group]
    return {
        "seconds": sum(seconds) / len(seconds),
        "low": min(seconds),
        "high": max(seconds),
        "seeds": sorted((run.config or {}).get(compare.SEED, 0) for run in group),
        "metric": metric,
        "target": target,
        "value": sum(run.reached["value"] for run in group) / len(group),
        "hardware": hardware,
        "commit": commit,
        "command": command,
    }


def _compared(command: str) -> str:
    """A command without what differs between seeds, and where data and results are."""
    parts, kept = shlex.split(command), []
    for position, part in enumerate(parts):
        before = parts[position - 1] if position else ""
        if part.partition("=")[0] in _NOT_COMPARED or before in _NOT_COMPARED:
            continue
        kept.append(part)
    return shlex.join(kept)
