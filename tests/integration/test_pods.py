"""The path of docs/pods.md from top to bottom, in a bucket on loopback: prepare, plan, train with two
processes, one of which is killed, evaluate beside them, and compare. The commands are those that the
guide prints; only names and sizes are replaced. The quick test has one process for the two, of which
`test_tiers.py` has more.
"""

import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import cv2
import numpy as np
import pytest
from etils import epath

from tests.conftest import QUICK
from tests.guide_commands import ROOT, lines_of
from tests.integration.conftest import HOSTS
from tests.integration.test_train import assert_same_bits, params_of
from tests.waiting import PATIENCE
from vit_jax.checkpoints import reading

STEPS, EVERY = 24, 8
TINY = HOSTS | {
    "batch_size": 8, "duration": f"{STEPS} steps", "checkpoint.every": f"{EVERY} steps", "log.every": "8 steps",
    "optim.warmup": "0 steps", "augment.mixup": 0.0, "audit.every": 0,
}  # fmt: skip
# What the guide prints, and what stands in for it.
INSTEAD = {
    "--config=configs/vit_i21k.py:B/16,light2": "--config=configs/digits.py",
    "--config.model.num_classes=21841": "--config.model.num_classes=2",
    "--topology=v5e:8x8": "--topology=cpu:2",
}
PATH = ["prepare", "prepare", "plan", "train", "evaluate", "report"]


def path_of_the_guide() -> list[list[str]]:
    """The commands of the numbered steps, without the name of the program."""
    text = (ROOT / "docs/pods.md").read_text().splitlines()
    begin, last = (
        next(number for number, line in enumerate(text, 1) if line.startswith(f"## {step}. "))
        for step in (1, 6)
    )
    end = next(n for n, line in enumerate(text, 1) if n > last and line.startswith("## "))
    found = []
    for where, words in lines_of(ROOT / "docs/pods.md"):
        if begin < int(where.partition(":")[2]) < end and words[0] != "gcloud":
            found.append(words[1:])
    return found


@pytest.fixture
def make(bucket, tmp_path, compilation_cache):
    """`make(words)`: a command of the guide, with this test's bucket, folder and sizes."""
    overrides = [f"--config.{n}={v}" for n, v in TINY.items()]
    overrides += [f"--config.compilation_cache={compilation_cache}"]

    def make(words: list[str]) -> list[str]:
        words = [INSTEAD.get(word, word).replace("gs://BUCKET", bucket) for word in words]
        words = [w.replace("--out=report", f"--out={tmp_path}/report") for w in words]
        return [*words, *overrides] if "--config=configs/digits.py" in words else words

    return make


@pytest.fixture
def start(bucket_environment):
    """`start(words, devices)`: a command in a process of its own."""
    started = []

    def start(words: list[str], devices: int = 1) -> subprocess.Popen:
        flags = f"--xla_force_host_platform_device_count={devices} {QUICK}"
        environment = os.environ | bucket_environment | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        process = subprocess.Popen(
            [sys.executable, "-m", "vit_jax", *words], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def write_images(folder: pathlib.Path) -> None:
    """Two classes, of noise around another grey each."""
    random = np.random.default_rng(0)
    for split, count in (("train", 20), ("test", 6)):
        for label, grey in (("cat", 60), ("dog", 160)):
            place = folder / split / label
            place.mkdir(parents=True)
            for number in range(count):
                image = random.integers(grey, grey + 40, (40, 40, 3), np.uint8)
                assert cv2.imwrite(str(place / f"{number}.png"), image)


def kill_the_first_process(supervisor: subprocess.Popen, workdir: epath.Path) -> list[int]:
    """Kills process 0 of a run, which holds the lock and saves, once there is a checkpoint; gives the steps
    that were saved then.
    """
    while not (saved := reading.saved_steps(workdir / "checkpoints")):
        assert supervisor.poll() is None, supervisor.communicate()[0]
        time.sleep(0.1)
    tasks = pathlib.Path(f"/proc/{supervisor.pid}/task/{supervisor.pid}/children")
    os.kill(int(tasks.read_text().split()[0]), signal.SIGKILL)
    return saved


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_path_of_the_guide_runs_from_top_to_bottom(
    command, make, start, bucket, tmp_path, processes
):
    lines = path_of_the_guide()
    assert [next(w for w in words if w in PATH) for words in lines] == PATH
    prepare, verify, plan, train, evaluate, report = map(make, lines)
    images, raw, workdir = (
        tmp_path / "raw",
        epath.Path(bucket) / "raw",
        epath.Path(bucket) / "runs/b16",
    )
    write_images(images)
    for path in images.rglob("*.png"):
        (raw / path.relative_to(images)).write_bytes(path.read_bytes())

    for words in (prepare, verify):
        code, out, err = command(*words)
        assert code == 0, err
    assert "52 records are good" in out
    code, out, err = command(*plan, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["fits"], err

    train = [word.replace("--processes=2", f"--processes={processes}") for word in train]
    run = start(train)
    killer = threading.Thread(target=kill_the_first_process, args=(run, workdir))
    killer.start()
    code, out, err = command(*evaluate, "--json")  # returns when the run is done
    killer.join()
    output, _ = run.communicate(timeout=PATIENCE)
    assert run.returncode == 0 and "process 0 was ended by SIGKILL" in output, output
    assert "resumed at step" in output, output
    assert code == 0, err
    followed = json.loads(out.splitlines()[-1])
    assert followed["steps"][-1] == STEPS and len(set(followed["steps"])) == len(followed["steps"])
    result = json.loads((workdir / "result.json").read_text())
    assert followed["accuracy"] == result["accuracy"] and result["step"] == STEPS

    code, out, err = command(*report)
    assert code == 0 and "1 done" in out, err
    assert "beside" in (tmp_path / "report" / "report.md").read_text()

    # That one process in a bucket goes on to the same bits is of `test_buckets.py`.
    if processes > 1:
        assert command("prepare", images, f"--out={tmp_path}/data")[0] == 0
        # One process with as many devices, which nobody supervises, computes the same.
        alone = [word.replace(bucket, str(tmp_path)) for word in train[train.index("--") + 1 :]]
        undisturbed = start(alone, devices=processes)
        output, _ = undisturbed.communicate(timeout=PATIENCE)
        assert undisturbed.returncode == 0, output
        assert_same_bits(params_of(workdir), params_of(tmp_path / "runs/b16"))
