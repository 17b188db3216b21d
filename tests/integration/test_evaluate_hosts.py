"""Several processes evaluate together: the numbers of one process, and a standard output that is JSON alone."""

import csv
import json
import os
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests.conftest import QUICK
from tests.models.conftest import parameters
from tests.services.ports import free_port
from tests.waiting import PATIENCE
from vit_jax.interchange import formats
from vit_jax.models import registry
from vit_jax.models.preprocessing import Preprocessing

CLASSES = ("red", "green", "blue")
IMAGES = 37  # which no number of processes divides


@pytest.fixture(scope="module")
def several(tmp_path_factory):
    """A checkpoint with sigmoids, and a list of images with up to three labels, some without any."""
    folder, random = tmp_path_factory.mktemp("several"), np.random.default_rng(0)
    lines = []
    for i in range(IMAGES):
        labels = [name for name in CLASSES if random.random() < 0.4] if i % 5 else []
        cv2.imwrite(str(folder / f"{i}.png"), random.integers(0, 256, (32, 32, 3), np.uint8))
        lines.append(json.dumps({"path": f"{i}.png", "label": labels, "split": "test"}))
    (folder / "list.jsonl").write_text("\n".join(lines))
    config = registry.model_config(
        "ViT-Ti/16", width=16, depth=2, heads=2, mlp_dim=24, patch=8, image_size=32, num_classes=3
    )
    checkpoint = formats.LoadedCheckpoint(
        config, parameters(config), CLASSES, Preprocessing(32), probabilities="sigmoid"
    )
    formats.write_checkpoint(checkpoint, folder / "model", "orbax")
    return folder


def evaluate(folder, out, count: int) -> list[str]:
    """What each of `count` processes prints to standard output."""
    port, options = free_port(), {"thresholds": "f1", "out": str(out), "images": True}
    command = [
        sys.executable, "-m", "vit_jax", "evaluate", f"--checkpoint={folder / 'model'}", "--json",
        "--config.data.name=folder", f"--config.data.path={folder / 'list.jsonl'}", "--config.eval.batch_size=8",
        f"--config.eval.evaluators={('accuracy', ('classification', options))!r}",
    ]  # fmt: skip
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK}
    started = []
    for i in range(count):
        hosts = [f"--coordinator=127.0.0.1:{port}", f"--num_processes={count}", f"--process_id={i}"]
        started.append(
            subprocess.Popen(
                [*command, *(hosts if count > 1 else ())],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
            )
        )  # fmt: skip
    try:
        printed = [process.communicate(timeout=PATIENCE) for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0] * count, printed[0][1]
    return [out for out, _ in printed]


@pytest.mark.slow
def test_several_processes_print_the_metrics_of_one_and_nothing_else(several, tmp_path):
    found, tables = {}, {}
    for count in (1, 2, 4):
        out = tmp_path / str(count)
        first, *others = evaluate(several, out, count)
        assert not any(others)
        found[count] = json.loads(first)
        tables[count] = {
            path.name: list(csv.reader(path.open())) for path in sorted(out.glob("*.csv"))
        }
    assert found[1]["classification/examples"] == IMAGES > found[1]["classification/labelled"]
    for count in (2, 4):
        assert found[count] == pytest.approx(found[1], abs=1e-6)
        for name, rows in tables[1].items():
            assert [row[0] for row in rows] == [row[0] for row in tables[count][name]]
        assert tables[count]["classes.csv"][0] == tables[1]["classes.csv"][0]
