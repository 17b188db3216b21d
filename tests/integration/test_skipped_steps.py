"""A run that skips the update of any one of its steps does all else that is due: it evaluates, saves and logs."""

import json
import pathlib

import jax.numpy as jnp
import pytest

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.objectives import OBJECTIVES
from vit_jax.objectives.supervised import Supervised

STEPS = 12
RUN = {
    "nonfinite": "skip", "log.every": "1 steps", "eval.every": "3 steps", "checkpoint.every": "4 steps",
    "checkpoint.keep": 10, "optim.ema": 0.9, "optim.schedule": "linear", "objective.name": "skipping",
}  # fmt: skip


class Skipping(Supervised):
    """Supervised, but for the loss of one step, which is not a number."""

    bad_step = 0

    def of_output(self, learner, output, layers, batch, rngs):
        loss, metrics = super().of_output(learner, output, layers, batch, rngs)
        return jnp.where(learner.step == self.bad_step - 1, jnp.nan, loss), metrics


def what_was_done(workdir: pathlib.Path) -> dict:
    """Which steps were logged, evaluated and saved, and how many updates were made."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    saved = (workdir / "checkpoints").iterdir()
    return {
        "logged": [line["step"] for line in lines if "learning_rate" in line],
        "evaluated": [line["step"] for line in lines if "accuracy" in line and "loss" in line],
        "saved": sorted(path.name for path in saved),
        "ended": json.loads((workdir / "result.json").read_text())["step"],
        "skipped": max(line.get("skipped_updates", 0) for line in lines),
    }


@pytest.mark.slow
def test_what_is_due_at_a_step_whose_update_is_skipped_is_done(
    monkeypatch, compilation_cache, tmp_path
):
    monkeypatch.setitem(OBJECTIVES, "skipping", Skipping)
    done = []
    for step in range(STEPS + 1):  # step 0: none is skipped
        monkeypatch.setattr(Skipping, "bad_step", step)
        config = vit_jax.load_config("configs/digits.py")
        config.update_from_flattened_dict(TINY | RUN | {"compilation_cache": compilation_cache})
        vit_jax.train(config, tmp_path / str(step))
        done.append(what_was_done(tmp_path / str(step)))
    assert done[0]["evaluated"] and done[0]["saved"] and done[0]["logged"] == [*range(1, STEPS + 1)]
    assert done[1:] == [done[0] | {"skipped": 1}] * STEPS
