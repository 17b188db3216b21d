"""How images are normalised is said by the checkpoint or by the user, and never guessed."""

import absl.logging
import jax
import numpy as np
import pytest
from PIL import Image

import vit_jax
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class
from vit_jax.evaluation.run import evaluate_run
from vit_jax.interchange import formats, loading
from vit_jax.models import registry
from vit_jax.prediction.images import find_images
from vit_jax.prediction.predict import Prediction, predict

SAID = {"mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A plain ViT with timm's names, which do not say how its images were normalised."""
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, num_classes=10, activation="gelu"
    )
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: rng.normal(0, 0.3, x.shape).astype(np.float32), registry.abstract(config)[1]
    )
    path = tmp_path_factory.mktemp("timm") / "vit.safetensors"
    formats.write_checkpoint(formats.LoadedCheckpoint(config, params), path, "timm")
    return path


@pytest.fixture(scope="module")
def unsaid(file):
    """It, converted without a word about its images."""
    loading.convert(file, file.parent / "run", "orbax")
    return file.parent / "run"


@pytest.fixture(scope="module")
def image(file):
    path = file.parent / "image.png"
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def test_predicting_and_evaluating_ask_where_nobody_says(unsaid, image):
    run = vit_jax.load_run(unsaid)
    message = (
        "run/checkpoints/0 does not say how images are normalised: set config.data.mean and std"
    )
    with pytest.raises(ConfigError, match=message):
        list(predict(run, find_images([str(image)]), topk=1, batch_size=1))
    with pytest.raises(ConfigError, match=message):
        evaluate_run(run, schema.typed(config_class(), run.config))
    # In every format that it is written in, it is still not said.
    for to in ("timm", "huggingface"):
        loading.convert(unsaid, unsaid.parent / to, to)
        assert formats.read_checkpoint(unsaid.parent / to).preprocessing is None
    with pytest.raises(ConfigError, match="does not say how images are normalised"):
        loading.convert(unsaid, unsaid.parent / "half", "orbax", data={"mean": SAID["mean"]})
    with pytest.raises(ConfigError, match="no field 'means'; did you mean 'mean'"):
        loading.convert(unsaid, unsaid.parent / "half", "orbax", data={"means": SAID["mean"]})
    assert not (unsaid.parent / "half").exists()


def test_what_is_said_at_conversion_is_used_and_named(file, unsaid, image, caplog):
    absl.logging.get_absl_logger().propagate = True
    said = SAID | {"eval_crop": "resize"}
    loading.convert(file, file.parent / "said", "orbax", data=said)
    assert formats.read_checkpoint(file.parent / "said").preprocessing == formats.Preprocessing(
        8, **said
    )
    run = vit_jax.load_run(file.parent / "said")
    with caplog.at_level("INFO"):
        (found,) = predict(run, find_images([str(image)]), topk=10, batch_size=1)
    assert isinstance(found, Prediction)
    assert (
        "images: 8 pixels (resize, bilinear), mean (0.485, 0.456, 0.406), std (0.229" in caplog.text
    )
    pixels = np.asarray(Image.open(image), np.float32) / 255
    logits = run.model((pixels - SAID["mean"])[None] / SAID["std"]).logits[0]
    np.testing.assert_allclose(
        found.probabilities, np.sort(jax.nn.softmax(logits))[::-1], atol=1e-5
    )
    # Said later, to what had been left open, it gives the same.
    late = vit_jax.load_run(unsaid)
    late.config.data.update(said)
    (again,) = predict(late, find_images([str(image)]), topk=10, batch_size=1)
    assert again.probabilities == found.probabilities


def test_the_commands_ask_and_are_told(file, unsaid, image, tmp_path, command):
    mean, std = (f"--config.data.{name}={value}" for name, value in SAID.items())
    ask = "does not say how images are normalised: set config.data.mean and std"
    code, _, err = command("predict", f"--checkpoint={unsaid}", image)
    assert code == 2 and ask in err
    code, _, err = command("evaluate", f"--checkpoint={unsaid}", "--config.data.name=digits")
    assert code == 2 and ask in err
    told = command("predict", f"--checkpoint={unsaid}", image, mean, std, "--json")
    assert told[0] == 0
    # The file itself asks and is told alike, without a conversion.
    code, _, err = command("predict", f"--checkpoint={file}", image)
    assert code == 2 and ask in err
    assert command("predict", f"--checkpoint={file}", image, mean, std, "--json")[:2] == told[:2]
    bicubic = "--config.data.interpolation=bicubic"
    code, _, err = command("predict", f"--checkpoint={file}", image, mean, std, bicubic)
    assert code == 0
    code, _, err = command("convert", file, tmp_path / "run", "--to=orbax", mean, std)
    assert code == 0 and "does not say" not in err
    after = command("predict", f"--checkpoint={tmp_path / 'run'}", image, "--json")
    assert after[:2] == told[:2]
    # What they cannot use is refused before anything is written.
    other = command("convert", file, tmp_path / "b", "--to=orbax", "--config.data.image_size=16")
    assert other[0] == 2 and "convert cannot use config.data.image_size, only data.mean" in other[2]
    code, _, err = command("predict", f"--checkpoint={unsaid}", image, mean, "--config.data.std=0")
    assert code == 2 and "config.data.std" in err
    assert not (tmp_path / "b").exists()
