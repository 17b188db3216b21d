"""A save beside training: what may happen to the machine meanwhile."""

import itertools
import time

import jax.numpy as jnp

from vit_jax.checkpoints import saving
from vit_jax.config import Checkpoint

DESCRIPTION = {"config": {}, "model": {}, "classes": [], "training_data": ""}
DAY = 86_400


def test_a_clock_that_is_set_while_a_save_waits_does_not_end_it(tmp_path, monkeypatch):
    now, days = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + DAY * next(days))
    checkpoints = saving.Checkpoints(tmp_path, Checkpoint(max_failures=1))
    checkpoints.save_now(1, {"params": {"a": jnp.zeros(9)}}, DESCRIPTION)
    checkpoints.close()
    assert checkpoints.steps() == [1] and next(days) > 1
