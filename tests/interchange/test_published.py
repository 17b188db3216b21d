"""A published model by its name, from a hub on this machine: what users get without saying more."""

import csv
import json

import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.data.decoding import decode
from vit_jax.data.labels import imagenet
from vit_jax.data.options import Data
from vit_jax.interchange import formats, safetensors
from vit_jax.models import registry
from vit_jax.models.preprocessing import IMAGENET_MEAN, IMAGENET_STD

NAME = "timm/deit_tiny_patch16_224.fb_in1k"
SAID = {
    "architecture": "deit_tiny_patch16_224",
    "num_classes": 1000,
    "pretrained_cfg": {
        "input_size": [3, 224, 224],
        "interpolation": "bicubic",
        "crop_pct": 0.9,
        "mean": list(IMAGENET_MEAN),
        "std": list(IMAGENET_STD),
    },
}


@pytest.fixture
def deit(hub, shared_data):  # noqa: F811
    """The published DeiT-Ti/16 on the hub."""
    weights = shared_data / "weights" / "deit_tiny_patch16_224_lnq.timm.safetensors"
    hub.repositories[NAME] = {
        "model.safetensors": weights.read_bytes(), "config.json": json.dumps(SAID).encode()
    }  # fmt: skip
    return f"hf://{NAME}"


@pytest.fixture
def labelled(shared_data, tmp_path):
    """The 200 images as data that names its classes by number."""
    folder = shared_data / "imagenet_sample"
    with (folder / "labels.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = [f"{folder / row['file']},{row['label']}" for row in rows]
    (tmp_path / "images.csv").write_text("\n".join(["path,label", *lines]))
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(1000))))
    return tmp_path / "images.csv"


def cropped(image, kind, side, size):
    """timm's Resize and CenterCrop, or those of transformers, in their formulas, by Pillow."""
    resized = [side * length // min(image.size) for length in image.size]
    resized = [side, side] if kind == "squash" else resized
    image = image.resize(resized, Image.Resampling.BICUBIC)
    rounded = int if kind == "transformers" else round
    left, top = (rounded((length - size) / 2.0) for length in image.size)
    return np.asarray(image.crop((left, top, left + size, top + size)), np.float64)


def psnr(a, b):
    return 10 * np.log10(255**2 / max(np.mean((np.asarray(a, np.float64) - b) ** 2), 1e-9))


@pytest.mark.parametrize(
    ("kind", "side", "size"),
    [
        ("torchvision", 248, 224),
        ("torchvision", 384, 384),
        ("squash", 404, 384),
        ("transformers", 256, 224),
    ],
)
def test_crops_are_those_of_the_code_they_are_named_for(shared_data, kind, side, size):
    data = Data(image_size=size, eval_crop=kind, eval_resize=side, interpolation="bicubic")
    found = []
    for path in sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[::20]:
        expected = cropped(Image.open(path).convert("RGB"), kind, side, size)
        found.append(psnr(decode.eval_crop(path.read_bytes(), data, name=path.name), expected))
    assert min(found) > 45


@pytest.mark.slow
def test_all_crops_are_those_of_torchvision(shared_data):
    data = Data(eval_crop="torchvision", eval_resize=248, interpolation="bicubic")
    found = []
    for path in sorted((shared_data / "imagenet_sample").glob("*.JPEG")):
        expected = cropped(Image.open(path).convert("RGB"), "torchvision", 248, 224)
        found.append(psnr(decode.eval_crop(path.read_bytes(), data, name=path.name), expected))
    assert len(found) == 200 and min(found) > 45


@pytest.mark.slow
def test_deit_by_its_name_has_its_published_predictions(deit, labelled, command):
    """timm: 80.5 % and 97.0 % of the 200 images."""
    code, out, err = command(
        "evaluate", f"--checkpoint={deit}", "--config.data.name=folder",
        f"--config.data.path={labelled}", "--config.data.holdout=0", "--config.data.eval_split=train",
        "--config.batch_size=40", "--json",
    )  # fmt: skip
    assert code == 0, err
    found = json.loads(out.splitlines()[-1])
    assert found["examples"] == 200
    assert found["accuracy"] >= 0.805 and found["top5_accuracy"] >= 0.97


def test_deit_by_its_name_predicts(deit, labelled, shared_data, command):
    images = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[:2]
    code, out, err = command("predict", f"--checkpoint={deit}", "--topk=1", "--json", *images)
    assert code == 0, err
    assert [one["predictions"][0]["class"] for one in json.loads(out.splitlines()[-1])] == [
        "tench",
        "electric ray",
    ]
    code, _, err = command("evaluate", f"--checkpoint={deit}")
    assert code == 2 and "names no data: set what to evaluate on" in err


def test_a_model_without_head_gives_features_and_no_predictions(
    hub,  # noqa: F811
    shared_data,
    command,
    tmp_path,
):
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, activation="gelu", num_classes=0
    )
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), registry.abstract(config)[1])
    prepared = formats.Preprocessing(8)
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, None, prepared), tmp_path / "body", "timm"
    )
    hub.repositories["me/body"] = {f.name: f.read_bytes() for f in (tmp_path / "body").iterdir()}
    image = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[0]
    code, _, err = command("predict", "--checkpoint=hf://me/body", image)
    assert code == 2 and "hf://me/body: the model has no head" in err and "--features" in err
    out = tmp_path / "features.npz"
    code, _, err = command("predict", "--checkpoint=hf://me/body", f"--features={out}", image)
    assert code == 0, err
    assert np.load(out)["features"].shape == (1, 32)


def test_what_a_file_does_not_tell_is_asked_for_and_said(shared_data, command, tmp_path):
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, activation="gelu", num_classes=2
    )
    params = jax.tree.map(lambda x: np.ones(x.shape, np.float32), registry.abstract(config)[1])
    formats.write_checkpoint(
        formats.LoadedCheckpoint(config, params, None), tmp_path / "a.safetensors", "timm"
    )
    tensors = {n: np.asarray(t) for n, t in safetensors.read(tmp_path / "a.safetensors")[0].items()}
    specs = {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}
    safetensors.write(tmp_path / "bare.safetensors", tensors.items(), specs, {})
    image = sorted((shared_data / "imagenet_sample").glob("*.JPEG"))[0]
    checkpoint = f"--checkpoint={tmp_path / 'bare.safetensors'}"
    images = ("--config.data.mean=0.5", "--config.data.std=0.5")
    code, _, err = command("predict", checkpoint, image, *images)
    assert code == 1 and "--model=heads=" in err
    code, _, err = command("predict", checkpoint, image, *images, "--model=heads=2")
    assert code == 0, err


def test_a_checkpoint_of_another_format_is_a_run_to_use(deit):
    run = vit_jax.load_run(deit)
    assert run.model_config.width == 192 and run.config.data.mean == IMAGENET_MEAN
    assert (run.config.data.eval_crop, run.config.data.eval_resize) == ("torchvision", 248)
    assert run.classes == tuple(imagenet.classes().values())


@pytest.mark.slow
def test_fine_tuning_starts_from_a_name(deit, labelled, command, tmp_path):
    said = (
        "--config=configs/finetune.py", f"--config.init_from={deit}", f"--workdir={tmp_path / 'run'}",
        "--config.data.name=folder", f"--config.data.path={labelled}", "--config.data.image_size=32",
        "--config.duration=2 steps", "--config.optim.warmup=0 steps", "--config.batch_size=16",
        "--config.accumulate=1", "--config.compilation_cache=",
    )  # fmt: skip
    code, out, err = command("train", *said, "--dry_run")
    assert code == 0, err
    assert "config.data.interpolation = 'bicubic'" in out and str(IMAGENET_MEAN) in out
    code, _, err = command("train", *said, "--json")
    assert code == 0, err
    code, out, err = command("show", tmp_path / "run", "--json")
    assert json.loads(out.splitlines()[-1])["init_from"] == deit
