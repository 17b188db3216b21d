"""Names of classes, and tensors to skip, that the user gives for a bare file: `--classes=FILE`, `--ignore=PATTERN`."""

import json

import jax
import numpy as np
import pytest
from PIL import Image
from safetensors.numpy import load_file, save_file

import vit_jax
from vit_jax.base.errors import ConfigError
from vit_jax.data.labels.class_files import read_classes
from vit_jax.interchange import formats, loading
from vit_jax.models import registry

NAMES = ("bus", "tram", "train")


@pytest.fixture(scope="module")
def bare(tmp_path_factory):
    """A file without names of classes."""
    options = dict(image_size=8, depth=1, width=16, mlp_dim=16, heads=2, num_classes=3)
    config = registry.model_config("ViT-mu/4", **options, activation="gelu_tanh", epsilon=1e-6)
    random = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: random.standard_normal(x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    path = tmp_path_factory.mktemp("bare") / "model.npz"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), path, "official")
    return path


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """A photo of each class, in a folder of its name."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(1)
    for name in NAMES:
        (folder / name).mkdir()
        image = random.integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(image).save(folder / name / "0.png")
    return folder


def test_a_run_answers_and_is_judged_by_the_given_names_and_keeps_them(bare, photos, tmp_path):
    run = vit_jax.load_run(bare, model={"heads": 2}, classes=NAMES)
    image = photos / "bus" / "0.png"
    answer, numbers = run(image, topk=3), vit_jax.load_run(bare, model={"heads": 2})(image, topk=3)
    assert answer.names == tuple(NAMES[int(number)] for number in numbers.names)
    labelled = dict(data=photos, data__eval_split="train", data__holdout=0.0)
    right = [run(photos / name / "0.png").names[0] == name for name in NAMES]
    assert run.evaluate(**labelled)["accuracy"] == pytest.approx(np.mean(right))
    run.save(tmp_path / "kept")
    assert vit_jax.load_run(tmp_path / "kept").classes == NAMES


@pytest.mark.parametrize(
    "classes, words",
    [
        (("a", "b"), "the model has 3 classes, and 2 names are given"),
        (("a", "b", "a"), "the name 'a' is given to several classes"),
    ],
)
def test_names_that_do_not_fit_the_model_are_refused(bare, classes, words):
    with pytest.raises(ConfigError, match=words):
        loading.read_model(bare, {"heads": 2, "classes": classes})


def test_a_run_of_ours_names_its_classes_itself(bare, tmp_path):
    vit_jax.load_run(bare, model={"heads": 2}).save(tmp_path / "run")
    with pytest.raises(ConfigError, match="leave --model and --classes out"):
        vit_jax.load_run(tmp_path / "run", classes=NAMES)


@pytest.mark.parametrize("text", ["bus\ntram\ntrain\n", "\ufeffbus\r\n tram \r\ntrain\r\n\r\n"])
def test_a_file_has_a_name_on_each_line(tmp_path, text):
    (tmp_path / "names.txt").write_text(text, encoding="utf-8", newline="")
    assert read_classes(str(tmp_path / "names.txt"), "--classes") == NAMES


@pytest.mark.parametrize(
    "content, words", [(None, "there is no such file"), (b"\n\n", "has no names")]
)
def test_a_file_without_names_is_refused(tmp_path, content, words):
    if content is not None:
        (tmp_path / "names.txt").write_bytes(content)
    with pytest.raises(ConfigError, match=f"--classes=.*{words}"):
        read_classes(str(tmp_path / "names.txt"), "--classes")


@pytest.mark.slow
def test_each_command_that_answers_takes_them(bare, photos, tmp_path, command):
    (tmp_path / "names.txt").write_text("\n".join(NAMES))
    flags = (
        f"--checkpoint={bare}",
        f"--classes={tmp_path / 'names.txt'}",
        "--model=heads=2",
        "--json",
    )
    code, out, _ = command("predict", *flags, photos / "bus" / "0.png")
    (answer,) = json.loads(out.splitlines()[-1])
    assert code == 0 and {one["class"] for one in answer["predictions"]} == set(NAMES)
    data = ("--config.data.name=folder", f"--config.data.path={photos}")
    whole = ("--config.data.eval_split=train", "--config.data.holdout=0.0")
    code, out, _ = command("evaluate", *flags, *data, *whole)
    assert code == 0 and "accuracy" in json.loads(out.splitlines()[-1])
    code, out, _ = command("export", *flags, "--to=stablehlo", f"--out={tmp_path / 'm.zip'}")
    assert code == 0 and json.loads(out.splitlines()[-1])["classes"] == list(NAMES)


@pytest.mark.slow
def test_tensors_are_skipped_by_a_flag_too(bare, photos, tmp_path, command):
    loading.convert(bare, tmp_path / "a.safetensors", "timm", heads=2, activation="gelu")
    tensors = load_file(tmp_path / "a.safetensors")
    save_file(tensors | {"gadget.scale": np.ones(3, np.float32)}, tmp_path / "b.safetensors")
    stated = ("--model=heads=2", "--model=activation=gelu", "--model=pool=token")
    prepared = ("--config.data.mean=(0.5,0.5,0.5)", "--config.data.std=(0.5,0.5,0.5)")
    checkpoint, photo = f"--checkpoint={tmp_path / 'b.safetensors'}", photos / "bus" / "0.png"
    code, _, log = command("predict", checkpoint, *stated, *prepared, photo)
    assert code != 0 and "b.safetensors#ignore=PATTERN" in log
    ignored = r"--ignore=gadget\..*"
    code, *_ = command("predict", checkpoint, *stated, *prepared, ignored, photo)
    assert code == 0
    code, out, _ = command("show", tmp_path / "b.safetensors", *stated, ignored, "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["format"] == "timm"
