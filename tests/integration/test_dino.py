"""Runs of self-distillation, stopped, gone on with and read."""

import jax
import numpy as np
import pytest

import vit_jax
from vit_jax.checkpoints import reading
from vit_jax.recipes.user_files import load_config
from vit_jax.training import loop
from vit_jax.training.assembly import assemble, resolve


def small(**changes):
    config = load_config("configs/dino.py:smoke")
    config.update_from_flattened_dict(
        {
            "model.depth": 1,
            "model.width": 32,
            "model.mlp_dim": 64,
            "objective.prototypes": 16,
            "objective.head_hidden": 16,
            "objective.frozen_prototypes": "2 steps",
            "batch_size": 16,
            "duration": "6 steps",
            "checkpoint.every": "3 steps",
            "data.train_split": "train[:200]",
            "data.eval_split": "test[:80]",
            "log.tensorboard": False,
        }
        | changes
    )
    return config


@pytest.mark.slow
def test_a_run_that_is_stopped_and_gone_on_with_is_the_same_to_the_bit(
    tmp_path, monkeypatch, stop_after
):
    result = vit_jax.train(small(), tmp_path / "whole")
    assert 0 < result["knn/accuracy"] <= 1
    # Stopped after 4 steps, where nothing is saved, and gone on with from step 3.
    stop_after(4, saving=False)
    with pytest.raises(loop.Interrupted):
        vit_jax.train(small(), tmp_path / "parts")
    monkeypatch.undo()
    vit_jax.train(small(), tmp_path / "parts")
    parts = {}
    for run in ("whole", "parts"):
        assembly = assemble(resolve(small()), num_classes=10, examples_per_epoch=200)
        like = jax.eval_shape(assembly.init, jax.random.key(0)).parts()
        parts[run] = jax.device_get(
            reading.read_parts(reading.find_checkpoint(tmp_path / run), like)
        )
    assert {"teacher", "teacher_objective", "objective_variables"} <= set(parts["whole"])
    assert np.abs(parts["whole"]["objective_variables"]["patch_centre"]).max() > 0
    jax.tree.map(np.testing.assert_array_equal, parts["whole"], parts["parts"])
    # What is read of it is the teacher.
    weights = reading.read_weights(tmp_path / "whole")
    jax.tree.map(np.testing.assert_array_equal, weights.params, parts["whole"]["teacher"])
