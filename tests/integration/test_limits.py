"""Runs where a process may have few files open: the soft limit of systemd, ssh and SLURM is 1,024."""

import contextlib
import json
import os
import resource
import time

import numpy as np
import pytest

from tests.integration.conftest import write_image
from vit_jax.data.preparation.prepare import prepare

FILES = 3467  # of ImageNet-21k as `prepare` writes it
IMAGES = {
    "data.name": "prepared", "data.train_crop": "resize", "data.image_size": 16, "model.num_classes": 2,
    "batch_size": 4096, "eval.batch_size": 32, "duration": "1 steps", "checkpoint.every": "1 steps",
    "eval.every": "1 steps", "optim.warmup": "0 steps", "audit.every": 0, "augment.mixup": 0.0,
}  # fmt: skip


def many_files(folder):
    """A prepared set of `FILES` files, which are links to one."""
    for i in range(32):
        write_image(folder / "raw" / "ab"[i % 2] / f"{i}.png")
    out = folder / "set"
    prepare(str(folder / "raw"), str(out), holdout=0.0)
    description = json.loads((out / "dataset.json").read_text())
    train = description["splits"]["train"]
    (shard,), labels = train["shards"], np.load(out / "train-labels.npy")
    shards = [shard | {"file": f"train-{i:05}.array_record"} for i in range(FILES)]
    for one in shards:
        os.link(out / shard["file"], out / one["file"])
    description["splits"]["test"] = train | {"shards": [shard]}
    description["splits"]["train"] = train | {"shards": shards, "examples": 32 * FILES}
    description["splits"]["train"]["labels"] = {"file": "many-labels.npy"}
    np.save(out / "many-labels.npy", np.tile(labels, FILES))
    (out / "dataset.json").write_text(json.dumps(description))
    return out


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_on_3467_files_has_few_of_them_open_at_a_time(hosts, tmp_path, processes):
    """Each process of two opens the files that one opens alone."""
    changes = IMAGES | {"data.path": many_files(tmp_path)}
    flags = [f"--config.{name}={value}" for name, value in changes.items()]
    run = hosts(tmp_path / "run", *flags, processes=processes)
    for process in run.processes:
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (1024, 1024))
    most = 0
    while any(process.poll() is None for process in run.processes):
        for process in run.processes:
            with contextlib.suppress(FileNotFoundError):  # it has just ended
                most = max(most, len(os.listdir(f"/proc/{process.pid}/fd")))
        time.sleep(0.05)
    assert run.codes() == [0] * processes, run.log(0)
    assert 128 < most <= 300
