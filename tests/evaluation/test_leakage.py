"""What `vit_jax evaluate` judges of a folder: all of it, unless the run was trained on it."""

import json
import pathlib
import shutil

import numpy as np
import pytest
from PIL import Image

import vit_jax
from tests.integration.conftest import TINY

CLASSES, EACH = ("cat", "dog"), 30


def photos(folder: pathlib.Path, seed: int) -> pathlib.Path:
    random = np.random.default_rng(seed)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
        for i in range(EACH):
            pixels = random.integers(0, 255, (32, 32 + seed, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on a folder, and that folder."""
    base = tmp_path_factory.mktemp("unseen")
    folder = photos(base / "train_photos", 0)
    config = vit_jax.load_config("configs/digits.py")
    data = {"data.name": "folder", "data.path": str(folder)}
    config.update_from_flattened_dict(
        TINY | data | {"compilation_cache": "", "duration": "1 steps", "log.tensorboard": False}
    )
    vit_jax.train(config, base / "run")
    return base / "run", folder


@pytest.fixture
def judged(command, trained, caplog, compilation_cache):
    """`judged(*arguments)`: what `vit_jax evaluate` finds of the run, and what it logs."""

    def call(*arguments) -> tuple[dict, str]:
        caplog.clear()
        code, out, err = command("evaluate", f"--checkpoint={trained[0]}", "--json", *arguments)
        assert code == 0, err
        return json.loads(out.splitlines()[-1]), caplog.text

    return call


def test_all_of_another_folder_is_judged_and_what_is_judged_is_logged(judged, tmp_path):
    photos(tmp_path / "new", 1)
    result, log = judged(f"--config.data.path={tmp_path}/new")
    assert result["examples"] == 60
    assert "evaluating on 60 images" in log and "all images" in log
    both = "--config.eval.evaluators=('accuracy', 'classification')"
    assert judged(f"--config.data.path={tmp_path}/new", both)[1].count("evaluating on 60") == 1
    few = [f"--config.data.path={tmp_path}/new", "--config.data.holdout=0.5"]
    assert 15 < judged(*few)[0]["examples"] < 45


def test_evaluators_that_learn_from_some_images_keep_these_apart(judged, tmp_path):
    photos(tmp_path / "new", 1)
    result, log = judged(f"--config.data.path={tmp_path}/new", "--evaluators=accuracy,knn")
    assert result["examples"] == 60 and "knn/accuracy" in result
    assert "the share config.data.holdout = 0.1" in log


@pytest.mark.parametrize("place", ["the same", "a copy", "a list inside"])
def test_of_the_training_folder_what_was_held_out_is_judged(judged, trained, tmp_path, place):
    folder = trained[1]
    held_out = judged()[0]
    if place == "a copy":
        folder = shutil.copytree(folder, tmp_path / "elsewhere")
    if place == "a list inside":
        files = sorted(folder.rglob("*.png"))
        (tmp_path / "link").symlink_to(folder)
        folder = tmp_path / "link" / "list.csv"
        rows = [f"{file.parent.name}/{file.name},{file.parent.name}" for file in files]
        folder.write_text("\n".join(["path,label", *rows]))
    again, log = judged(f"--config.data.path={folder}")
    assert again == held_out and held_out["examples"] < 15
    assert "the share config.data.holdout = 0.1" in log


def test_a_path_that_the_data_set_does_not_read_is_refused(command, trained):
    settings = ["--config.data.name=digits", "--config.data.path=/photos"]
    code, _, err = command("evaluate", f"--checkpoint={trained[0]}", *settings)
    assert code == 2 and "config.data.path = '/photos'" in err and "folder" in err
