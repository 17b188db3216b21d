"""What a window of steps is logged as: the mean of the updates that were made, and the rate of its last step."""

import json

import jax.numpy as jnp
import pytest
from etils import epath

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.objectives import OBJECTIVES
from vit_jax.objectives.supervised import Supervised
from vit_jax.studies import runs
from vit_jax.training.upkeep.progress import _without_skipped

BAD = 10  # the step whose loss is not a number


class Once(Supervised):
    """Supervised, but for one bad step."""

    def of_output(self, learner, output, layers, batch, rngs):
        loss, metrics = super().of_output(learner, output, layers, batch, rngs)
        return jnp.where(learner.step == BAD - 1, jnp.nan, loss), metrics


@pytest.fixture(scope="module")
def workdir(tmp_path_factory, compilation_cache):
    OBJECTIVES["once"] = Once
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(TINY | {"compilation_cache": compilation_cache})
    config.update_from_flattened_dict({"objective.name": "once", "nonfinite": "skip"})
    config.eval.evaluators = ("accuracy",)
    folder = tmp_path_factory.mktemp("once")
    vit_jax.train(config, folder)
    yield folder
    del OBJECTIVES["once"]


def test_a_skipped_step_is_not_averaged_and_the_run_is_done(workdir):
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    logged = {line["step"]: line for line in lines if "loss" in line}
    assert all(line["loss"] is not None for line in logged.values())
    assert {step: line["skipped_updates"] for step, line in logged.items()} == {
        1: 0,
        4: 0,
        8: 0,
        12: 1,
    }
    # That of the step itself, of a cosine to 0: the mean of its window is higher.
    assert logged[12]["learning_rate"] < logged[8]["learning_rate"] / 4
    assert runs.read_run(epath.Path(workdir), "once").state == "done"


def test_which_steps_were_skipped_is_told_from_the_count():
    window = [
        {"loss": loss, "skipped_updates": count} for loss, count in ((2.0, 1), (9.0, 2), (1.0, 2))
    ]
    assert [m["loss"] for m in _without_skipped(window, 1)] == [2.0, 1.0]
    assert [m["loss"] for m in _without_skipped(window, 0)] == [1.0]
    assert [m["loss"] for m in _without_skipped(window, None)] == [2.0, 1.0]
