"""Every `vit_jax launch` that README.md and docs/*.md print, as printed: a dry run, on a small set in a bucket on
loopback.
"""

import re

import cv2
import numpy as np
import pytest
from etils import epath

from launch.main import ENGINES
from tests.guide_commands import lines_of, ours
from tests.launch.test_scripts import ROOT
from vit_jax.data.preparation.prepare import prepare

LAUNCHES = [words for words in ours().values() if words[0] == "launch"]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of images of two classes, and the set that was prepared of it."""
    folder = tmp_path_factory.mktemp("data")
    random = np.random.default_rng(0)
    for split, label, number in np.ndindex(2, 2, 4):
        path = folder / "images" / ("train", "test")[split] / "ab"[label] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), random.integers(0, 255, (32, 32, 3), np.uint8))
    prepare(str(folder / "images"), str(folder / "set"))
    return folder


@pytest.mark.parametrize("words", LAUNCHES, ids=lambda words: words[1])
def test_a_run_is_launched_as_printed(words, launch, data, bucket, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)  # which is sent to the machines
    for path in (data / "set").glob("*"):
        (epath.Path(bucket) / "data" / path.name).write_bytes(path.read_bytes())
    stand_ins = {
        "gs://BUCKET": bucket,
        "BUCKET": bucket.removeprefix("gs://"),
        "/data/images": f"{data}/images",
        "/shared/data": f"{data}/set",
        "/shared/b16": f"{tmp_path}/run",
        "/data/runs": f"{tmp_path}/run",
        "num_classes=21841": "num_classes=2",
        "--nodes=4": "--nodes=1",  # as many devices as are simulated here
        "--nodes=2": "--nodes=1",
    }
    for name, value in stand_ins.items():
        words = [word.replace(name, value) for word in words]
    if "--" in words:
        few = "--config.optim.warmup=0 steps"  # few images make few steps
        start = words.index("--")
        end = words.index("--", start + 1) if words.count("--") > 1 else len(words)
        words = [*words[:start], "--dry_run", *words[start:end], few, *words[end:]]
    elif "--help" not in words:
        words.append("--dry_run")
    code, out, err = launch(*words[1:])
    assert code == 0 and out, err


def test_a_guide_prints_the_launch_of_the_real_recipe_by_every_engine():
    real = [words for words in LAUNCHES if "--config=configs/vit_i21k.py:B/16,light2" in words]
    assert {words[1] for words in real} == set(ENGINES)


def test_pods_begins_with_a_launch_whose_words_are_all_explained():
    page = ROOT / "docs/pods.md"
    _, words = next(lines_of(page))
    assert words[:2] == ["vit_jax", "launch"]
    table = [line for line in page.read_text().partition("## ")[0].splitlines() if line[:2] == "| "]
    explained = set(re.findall(r"`([^`]+)`", " ".join(line.split("|")[1] for line in table)))
    flags = {word.partition("=")[0] for word in words if word.startswith("--")}
    last = {flag for flag in flags if f".{flag.rpartition('.')[2]}" in explained}
    assert explained >= flags - last | {words[2]}
