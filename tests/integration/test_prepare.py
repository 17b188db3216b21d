"""From people's files to a trained model: prepare on the command line, then a run."""

import json

import cv2
import numpy as np
import pytest

import vit_jax

from ..data.preparation.conftest import kinds, seeded  # noqa: F401 - fixtures

TINY_IMAGES = {
    "data__train_crop": "resize",
    "data__image_size": 16,
    "batch_size": 16,
    "eval__batch_size": 8,
}


def test_a_folder_with_bad_files_is_prepared_verified_and_trained_on(
    seeded, tmp_path, command, tiny_config  # noqa: F811
):  # fmt: skip
    out = tmp_path / "out"
    code, told, errors = command(
        "prepare", seeded, f"--out={out}", "--holdout=0.3", "--verify", "--json"
    )
    assert code == 0, errors
    result = json.loads(told.splitlines()[-1])
    assert result["bad"] == 22 and result["ignored"] == 2 and result["verified"]["bad"] == []
    config = tiny_config(data__name="prepared", data__path=str(out), **TINY_IMAGES)
    result = vit_jax.train(config, tmp_path / "run")
    assert result["step"] == 12 and np.isfinite(result["loss"])
    file = next(out.glob("train*"))
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    code, told, errors = command("prepare", out, "--verify")
    assert code == 1 and f"{file.name}: its checksum has changed" in told, errors


@pytest.mark.slow
def test_images_with_several_labels_are_prepared_and_learned_with_a_sigmoid(
    tmp_path, tiny_config, caplog
):
    """Red and green squares: an image may hold both, one or none of them."""
    from vit_jax.data.preparation.prepare import prepare

    lines = []
    for i in range(96):
        image = np.zeros((16, 16, 3), np.uint8)
        labels = [name for bit, name in enumerate(("green", "red")) if i >> bit & 1]
        if "green" in labels:
            image[:8, :, 1] = 255
        if "red" in labels:
            image[8:, :, 2] = 255  # OpenCV's order is BGR
        cv2.imwrite(str(tmp_path / f"{i}.png"), image)
        split = "train" if i < 64 else "test"
        lines.append(json.dumps({"path": f"{i}.png", "label": labels, "split": split}))
    (tmp_path / "list.jsonl").write_text("\n".join(lines))
    result = prepare(str(tmp_path / "list.jsonl"), str(tmp_path / "out"))
    assert result["splits"] == {"train": 64, "test": 32}
    described = json.loads((tmp_path / "out/dataset.json").read_text())
    assert described["multi_label"] and described["classes"] == ["green", "red"]
    assert described["splits"]["train"]["class_counts"] == [32, 32]
    config = tiny_config(
        data__name="prepared", data__path=str(tmp_path / "out"), objective__loss="sigmoid",
        augment__mixup=0.0, duration="48 steps", eval__every="24 steps", **TINY_IMAGES,
    )  # fmt: skip
    with caplog.at_level("INFO", logger="absl"):
        result = vit_jax.train(config, tmp_path / "run")
    # Images of no class count in the loss, as in training; right is a label of the image.
    assert result["examples"] == 32 and result["accuracy"] == 1.0
    assert caplog.text.count("evaluation: 8 of 32 images have no label and count as images") == 1
    assert result["loss"] < 0.5


@pytest.mark.parametrize("shard", ["17/16", "0/16", "3", "a/b", "-1/2"])
def test_a_shard_that_cannot_be_is_refused_at_once(command, tmp_path, shard):
    code, _, errors = command("prepare", tmp_path, f"--out={tmp_path}/out", f"--shard={shard}")
    assert code == 2 and f"--shard={shard}" in errors and not (tmp_path / "out").exists()
