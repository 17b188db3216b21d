"""Storage that answers with errors, late, or not at all: what passes is tried again, what lasts ends
with a sentence, and neither counts as a damaged checkpoint.
"""

import concurrent.futures
import contextlib
import json

import jax
import jax.numpy as jnp
import pytest
from etils import epath

from tests.integration.test_train import assert_same_bits, params_of
from tests.waiting import PATIENCE, until
from vit_jax.base.buckets import Unreachable
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import saving
from vit_jax.config import Checkpoint
from vit_jax.training.loop import train

PARTS = {"params": {"a": jnp.arange(1000.0), "b": {"c": jnp.ones((64, 64))}}}
LIKE = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), PARTS)
DESCRIPTION = {"config": {}, "model": {"name": "ViT-mu/8"}, "classes": []}


@pytest.fixture
def saved(bucket):
    """The checkpoints of steps 4 and 8 in a bucket."""
    checkpoints = saving.Checkpoints(epath.Path(bucket), Checkpoint(max_failures=1))
    for step in (4, 8):
        checkpoints.save_now(step, PARTS, DESCRIPTION)
    return checkpoints


def test_a_run_goes_on_through_faults_that_pass(tiny_config, bucket, faults, tmp_path):
    config = tiny_config(duration="8 steps")
    expected = train(config, tmp_path)
    faults.inject("stall", seconds=5, times=1, path="ocdbt")
    faults.inject("status", status=429, every=97)
    faults.inject("status", status=500, every=101)
    faults.inject("reset", every=53)
    # The emulator forgets an upload in parts that it has finished, which Cloud Storage does not.
    faults.inject("lost", every=61, path="^(?!.*upload_id).*checkpoints")
    faults.inject("truncate", every=23, methods=("GET",))
    assert train(config, f"{bucket}/run")["accuracy"] == expected["accuracy"]
    # Again from its checkpoint, of which every byte is read.
    assert train(config, f"{bucket}/run")["step"] == 8
    assert len(faults.requests()) > 150
    faults.clear()
    assert_same_bits(params_of(epath.Path(bucket) / "run"), params_of(tmp_path))


def test_metrics_are_in_the_bucket_before_a_checkpoint_of_their_step_is(
    tiny_config, bucket, faults
):
    config = tiny_config(duration="4 steps", log__every="1 steps", eval__evaluators=())
    commits = {"path": "checkpoints/4/commit_success", "methods": ("POST", "PUT")}
    faults.inject("stall", seconds=PATIENCE, **commits)
    with concurrent.futures.ThreadPoolExecutor() as threads, contextlib.ExitStack() as at_last:
        at_last.callback(faults.clear)
        run = threads.submit(train, config, f"{bucket}/run")
        until(
            lambda: (
                run.done()
                or any(m in ("POST", "PUT") and "commit_success" in p for m, p in faults.requests())
            )
        )
        lines = (epath.Path(bucket) / "run/metrics.jsonl").read_text().splitlines()
        assert not run.done() and not (epath.Path(bucket) / "run/result.json").exists()
        assert [json.loads(line)["step"] for line in lines] == [1, 2, 3, 4]
        faults.clear()
        run.result()


def test_a_checkpoint_that_may_not_be_read_is_not_a_damaged_one(saved, bucket, faults):
    faults.inject("status", status=403, path="ocdbt")
    with pytest.raises(
        ConfigError, match=f"{bucket}/checkpoints/8: no permission .*storage.objectUser"
    ):
        saved.restore_latest(LIKE)
    faults.clear()
    assert saved.steps() == [4, 8] and saved.restore_latest(LIKE)[0] == 8


def test_a_save_that_is_forbidden_ends_with_a_sentence(saved, bucket, faults):
    faults.inject("status", status=403, methods=("POST",))
    with pytest.raises(ConfigError, match=f"cannot write the checkpoint of step 12 to {bucket}"):
        saved.save_now(12, PARTS, DESCRIPTION)
    faults.clear()
    assert saved.steps() == [4, 8]


def test_a_checkpoint_whose_bytes_have_changed_is_damaged(saved, bucket):
    for file in (epath.Path(bucket) / "checkpoints/8/state/ocdbt.process_0/d").iterdir():
        file.write_bytes(b"\0" * file.stat().length)
    assert saved.restore_latest(LIKE)[0] == 4
    assert saved.steps() == [4]


@pytest.mark.slow
@pytest.mark.parametrize("kind, status", [("status", 503), ("status", 429), ("reset", 0)])
def test_an_outage_ends_with_start_me_again(saved, bucket, faults, kind, status):
    faults.inject(kind, status=status, path="checkpoints")
    with pytest.raises(Unreachable, match=f"{bucket}/checkpoints"):
        saved.save_now(12, PARTS, DESCRIPTION)
