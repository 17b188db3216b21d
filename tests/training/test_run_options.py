"""Every option of `eval` and `checkpoint` with another value changes what an observer of the run sees: when it is
evaluated and saved, by what and how long it is judged, or what is kept.
"""

import json
import pathlib

import pytest

import vit_jax
from tests.training.test_options import UNCHANGING
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.config import Checkpoint, Eval

TINY = {
    "augment.mixup": 0.0, "audit.every": 0, "model.name": "ViT-mu/8", "model.width": 16, "model.depth": 1,
    "model.heads": 2, "model.mlp_dim": 24, "batch_size": 16, "duration": "6 steps", "log.every": "1 steps",
    "log.tensorboard": False, "data.eval_split": "test[:32]", "eval.every": "2 steps", "eval.best": "loss",
    "checkpoint.every": "2 steps", "optim.ema": 0.0,
}  # fmt: skip
# The value never changes, so that no evaluation after the first is better.
SAME = {"eval.best": "examples:max"}
# Value of the option, other fields of both runs, and what of `observed` changes.
CASES = {
    "eval.every": ("3 steps", {}, "evaluated"),
    "eval.evaluators": (("knn",), {"eval.best": ""}, "metrics"),
    "eval.best": ("accuracy", {}, "judged by"),
    "eval.patience": (1, SAME, "ended"),
    "eval.target": (1e9, {}, "ended"),
    "checkpoint.every": ("3 steps", {}, "saved"),
    "checkpoint.every_minutes": (1e-9, {"checkpoint.keep": 9}, "saved"),
    "checkpoint.local": ("{folder}", {"checkpoint.every": "0 steps", "checkpoint.local_every": "1 steps"}, "local"),
    "checkpoint.local_every": ("2 steps", {"checkpoint.every": "0 steps", "checkpoint.local": "{folder}"}, "local"),
    "checkpoint.keep": (1, {}, "saved"),
    "checkpoint.best": (True, {**SAME, "checkpoint.keep": 1}, "saved"),
    "checkpoint.keep_every": (2, {"checkpoint.keep": 1}, "saved"),
}  # fmt: skip
# Have tests of their own: below, and in tests/evaluation/test_several_labels.py.
APART = {"checkpoint.on_config_change", "eval.thresholds"}


def test_every_option_of_evaluations_and_checkpoints_is_tried():
    sections = {"eval": Eval, "checkpoint": Checkpoint}
    named = {f"{s}.{field.name}" for s, kind in sections.items() for field in schema.options(kind)}
    left = {name for name in UNCHANGING if name.partition(".")[0] in sections}
    assert {*CASES, *APART} | left == named and not {*CASES, *APART} & left


def observed(workdir: pathlib.Path, fields: dict, cache: str) -> dict:
    """What a run with these fields shows."""
    folder = workdir.with_name(f"{workdir.name}_local")
    config = vit_jax.load_config("configs/digits.py")
    config.compilation_cache = cache
    filled = {n: str(folder) if x == "{folder}" else x for n, x in fields.items()}
    config.update_from_flattened_dict(TINY | filled)
    local: dict[int, list[str]] = {}

    def look(step: int, metrics: dict) -> None:
        local[step] = sorted(path.name for path in folder.rglob("*")) if folder.exists() else []

    result = vit_jax.train(config, workdir, callbacks=[look])
    lines = list(map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines()))
    evaluations = [line for line in lines if any(name.startswith("eval/") for name in line)]
    return {
        "evaluated": [line["step"] for line in evaluations],
        "metrics": sorted(evaluations[-1]),
        "judged by": json.loads((workdir / "best.json").read_text())["metric"],
        "ended": result["step"],
        "saved": reading.saved_steps(reading.places.locate(workdir) / reading.FOLDER),
        "local": local,
    }


@pytest.mark.slow
@pytest.mark.parametrize("option", CASES)
def test_an_option_of_a_run_changes_what_is_seen_of_it(option, compilation_cache, tmp_path):
    value, base, claimed = CASES[option]
    first = observed(tmp_path / "first", base, compilation_cache)
    second = observed(tmp_path / "second", {**base, option: value}, compilation_cache)
    assert first[claimed] != second[claimed]


@pytest.mark.slow
def test_a_changed_config_is_refused_unless_it_is_allowed(compilation_cache, tmp_path):
    observed(tmp_path / "run", {}, compilation_cache)
    changed = {"optim.lr": 0.5, "duration": "8 steps"}
    with pytest.raises(ConfigError, match="checkpoint.on_config_change=allow"):
        observed(tmp_path / "run", changed, compilation_cache)
    allowed = changed | {"checkpoint.on_config_change": "allow"}
    assert observed(tmp_path / "run", allowed, compilation_cache)["ended"] == 8
