"""The metrics of a run's evaluations by step: the files beside its checkpoints have them."""

import json

from etils import epath

from vit_jax.base import places
from vit_jax.checkpoints import reading

METRICS = "metrics.jsonl"
RESULT = "result.json"
_PREFIX = "eval/"  # of the metrics of an evaluation in METRICS
# RESULT has these beside the metrics of the last evaluation.
_NO_METRICS = {"step", "seconds", "best", "goodput", "reached"}


def metrics_of(folder: epath.Path, step: int) -> dict[str, float | None]:
    """The metrics of a checkpoint's own evaluation; {} if it had none, or is no longer in its run's folder.

    Args:
      folder: of the checkpoint.
      step: at which it was saved.
    """
    if folder.parent.name != reading.FOLDER:
        return {}
    workdir = folder.parent.parent
    result = places.read_json(workdir / RESULT) or {}
    if result.get("step") == step:
        metrics = {name: value for name, value in result.items() if name not in _NO_METRICS}
        if metrics:
            return metrics
    evaluation = evaluations(workdir).get(step)
    if evaluation:
        return evaluation
    best = places.read_json(workdir / reading.BEST_RECORD) or {}
    return {best["metric"]: best["value"]} if best.get("step") == step else {}


def evaluations(workdir: epath.Path) -> dict[int, dict[str, float | None]]:
    """The metrics of a run's evaluations by their steps; {} of a run that wrote none."""
    path = workdir / METRICS
    if not path.exists():
        return {}
    by_step = {}
    for line in places.read_bytes(path).splitlines():
        if f'"{_PREFIX}'.encode() in line and line.endswith(b"}"):
            entry = json.loads(line)
            by_step[entry["step"]] = {
                name.removeprefix(_PREFIX): value
                for name, value in entry.items()
                if name.startswith(_PREFIX)
            }
    return by_step
