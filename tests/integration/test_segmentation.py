"""A model that segments, from files of images and masks to masks of other images, by commands as users type them."""

import json

import numpy as np
import pytest
from PIL import Image

TINY = (
    "--config.data.image_size=16", "--config.model.dtype=float32", "--config.batch_size=8",
    "--config.duration=2 steps", "--config.optim.warmup=0 steps", "--config.log.tensorboard=False",
    "--config.init_from=", "--config.data.mean=(0.5,)", "--config.data.std=(0.5,)",
    "--config.data.interpolation=bilinear", "--config.model.name=ViT-mu/8", "--config.eval.every=100%",
)  # fmt: skip


@pytest.fixture(scope="module")
def scenes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("scenes")
    for split, count in (("train", 4), ("val", 2)):
        for i in range(count):
            labels = np.random.default_rng(i).integers(0, 3, (4, 5)).repeat(6, 0).repeat(6, 1)
            for kind, pixels in (("images", np.stack([labels * 90] * 3, -1)), ("masks", labels)):
                path = folder / kind / split / f"{i}.png"
                path.parent.mkdir(parents=True, exist_ok=True)
                Image.fromarray(pixels.astype(np.uint8)).save(path)
    (folder / "classes.csv").write_text("name\nroad\ncar\nsky\n")
    return folder


def test_a_folder_of_masks_becomes_a_model_that_writes_masks(command, scenes, tmp_path, caplog):
    run, out = tmp_path / "run", tmp_path / "maps"
    recipe = "--config=configs/segmentation.py:linear", f"--config.data.path={scenes}"
    code, printed, err = command("train", *recipe, *TINY, f"--workdir={run}", "--json")
    assert code == 0, err
    trained = json.loads(printed.splitlines()[-1])

    code, printed, err = command("evaluate", f"--checkpoint={run}", "--json")
    assert code == 0, err
    judged = json.loads(printed.splitlines()[-1])
    assert judged["images"] == 2 and judged["mean_iou"] == trained["mean_iou"]

    (tmp_path / "broken.jpg").write_bytes(b"no image")
    images = str(scenes / "images/val/0.png"), str(tmp_path / "broken.jpg")
    code, printed, err = command("predict", f"--checkpoint={run}", *images, f"--out={out}")
    assert code == 1 and "broken.jpg" in caplog.text
    mask = Image.open(out / "0.png")
    assert mask.mode == "P" and mask.size == (30, 24) and np.asarray(mask).max() < 3
    assert Image.open(out / "0_overlay.png").size[0] > 30
    found = json.loads((out / "maps.json").read_text())
    assert found["classes"] == {"road": 0, "car": 1, "sky": 2}
    assert sum(found["images"][0]["classes"].values()) == pytest.approx(1)

    code, _, err = command("predict", f"--checkpoint={run}", images[0])
    assert code == 2 and "--out=FOLDER" in err


@pytest.mark.parametrize(
    "changes, message",
    [
        (("--config.data.name=digits", "--config.data.path="), "has none"),
        (("--config.augment.randaugment_layers=2",), "randaugment_layers = 2"),
        (("--config.augment.mixup=0.2",), "cannot learn from mixed images"),
        (("--config.data.permute=patches", "--config.data.permute_patch=8"), "config.data.permute"),
    ],
)
def test_what_masks_cannot_be_combined_with_is_refused_at_once(
    command, scenes, tmp_path, changes, message
):
    recipe = "--config=configs/segmentation.py:linear", f"--config.data.path={scenes}"
    workdir = tmp_path / "run"
    code, _, err = command("train", *recipe, *TINY, *changes, f"--workdir={workdir}", "--dry_run")
    assert code == 2 and message in err and not workdir.exists()


def test_an_objective_that_needs_classes_of_images_refuses_masks(command, scenes, tmp_path):
    data = "--config.data.name=masks", f"--config.data.path={scenes}"
    workdir = tmp_path / "run"
    code, _, err = command("train", "--config=configs/digits.py", *data, f"--workdir={workdir}")
    assert code == 2 and "has masks" in err and not workdir.exists()
