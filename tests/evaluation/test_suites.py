"""Suites over folders of images: what is there is judged, what is not is named."""

import dataclasses

import jax
import numpy as np
import pytest
from PIL import Image

from tests.models.conftest import parameters
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.config import config_class, default_config
from vit_jax.devices import meshes
from vit_jax.evaluation import corruptions, suites
from vit_jax.evaluation.contract import EvalContext, EvaluatedModel
from vit_jax.models import registry

CLASSES = ("ant", "bee", "cat", "dog")


@pytest.fixture(scope="module")
def context():
    config = default_config()
    config.update_from_flattened_dict({
        "model.name": "ViT-mu/8", "data.image_size": 16, "data.eval_crop": "resize", "batch_size": 8,
    })  # fmt: skip
    typed = schema.typed(config_class(), config)
    model_config = registry.model_config(
        "ViT-mu/8", image_size=16, num_classes=4, head_init="normal"
    )
    return EvalContext(typed, model_config, registry.abstract(model_config)[0], CLASSES)


@pytest.fixture(scope="module")
def weights(context):
    return registry.Weights(parameters(context.model_config), {})


def images(folder, classes, count=2):
    """A folder of class folders with images of noise."""
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = np.random.default_rng(10 * number + i).integers(0, 256, (16, 16, 3), np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{i}.png")


def judged(suite, weights):
    mesh = meshes.replica_mesh()
    with jax.set_mesh(mesh):
        return suite(EvaluatedModel(weights), mesh)


def test_sets_that_are_there_are_judged_and_the_others_named(
    context, weights, tmp_path, monkeypatch
):
    monkeypatch.setattr(corruptions, "ALEXNET", {"fog": 0.5, "snow": 0.8})
    monkeypatch.setattr(corruptions, "SEVERITIES", range(1, 3))
    images(tmp_path / "imagenet_r", ("cat", "ant"))
    for corruption in ("fog", "snow"):
        for severity in "12":
            images(tmp_path / "imagenet2012_corrupted" / corruption / severity, CLASSES, 1)
    suite, absent = suites.make("imagenet", context, str(tmp_path))
    assert set(absent) == {"imagenet", "real", "v2", "v2_threshold", "v2_top", "objectnet", "a"}
    assert "vit_jax prepare imagenet_a --out=DIR" in absent["a"]
    found = judged(suite, weights)
    assert found["r/examples"] == 4 and 0 <= found["r/accuracy"] <= 1
    # The same images in every folder: the same error everywhere.
    error = found["c/error"]
    assert found["c/fog"] == pytest.approx(error / 0.5)
    assert found["c/mce"] == pytest.approx((error / 0.5 + error / 0.8) / 2)
    lines = list(suites.table(found, absent))
    assert any(line.startswith("| r | ") for line in lines)
    assert any(line.startswith("a: skipped, ") for line in lines)


def test_mce_is_the_mean_over_corruptions_of_error_over_alexnet_s():
    random = np.random.default_rng(0)
    errors = {(c, s): random.random() for c in corruptions.ALEXNET for s in range(1, 6)}
    expected = 0.0
    for name, known in corruptions.ALEXNET.items():
        expected += sum(errors[name, s] for s in range(1, 6)) / (5 * known) / 15
    assert corruptions.summarized(errors)["mce"] == pytest.approx(expected, rel=1e-12)
    # AlexNet itself.
    own = {(c, s): e for c, e in corruptions.ALEXNET.items() for s in range(1, 6)}
    assert corruptions.summarized(own)["mce"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("imagenett", "no suite 'imagenett'; did you mean 'imagenet'"),
        (
            "imagenet",
            "is not prepared in .*: none of its sets is there .imagenet2012, .*--data_dir=DIR",
        ),
    ],
)
def test_a_suite_without_data_is_an_error_that_says_what_it_needs(context, tmp_path, name, message):
    with pytest.raises(ConfigError, match=message):
        suites.make(name, context, str(tmp_path))


def test_a_suite_for_other_classes_is_refused(context, tmp_path):
    images(tmp_path / "imagenet_a", ("cow",))
    with pytest.raises(ConfigError, match="the model knows no 'cow'"):
        suites.make("imagenet", context, str(tmp_path))


@pytest.mark.parametrize("name", ["few_shot", "knn"])
def test_a_suite_of_features_has_the_seven_sets(context, tmp_path, name):
    assert len(suites.SUITES[name]) == 7
    images(tmp_path / "fewshot" / "dtd", CLASSES, 12)
    headless = dataclasses.replace(context, classes=())
    suite, absent = suites.make(name, headless, str(tmp_path))
    assert [prefix for prefix, _ in suite.evaluators] == ["dtd"] and len(absent) == 6
