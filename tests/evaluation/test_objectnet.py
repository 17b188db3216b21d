"""ObjectNet's rule against plain Python, on a folder with its classes."""

import dataclasses

import numpy as np
import pytest
from PIL import Image

from vit_jax import config
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.labels.classes import with_classes
from vit_jax.data.sources.objectnet import CLASSES, IMAGENET


def images(folder, classes=CLASSES):
    """One image of each class, with its number inside a red border."""
    for number in range(classes):
        (folder / f"class_{number:03}").mkdir(parents=True)
        pixels = np.full((12, 10, 3), (255, 0, 0), np.uint8)
        pixels[2:-2, 2:-2] = (number % 256, number // 256, 7)
        Image.fromarray(pixels).save(folder / f"class_{number:03}" / "a.png")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data") / "objectnet"
    images(folder)
    return sources.open_eval(section(folder))


def section(folder):
    data = schema.typed(config.config_class(), config.default_config()).data
    return dataclasses.replace(data, name="objectnet", path=str(folder), eval_split="test")


def test_the_classes_that_imagenet_has_too_are_scored_without_their_border(source):
    assert len(source) == 113 == len(set(IMAGENET.values()))
    for record, label in zip((source[i] for i in range(len(source))), source.labels, strict=True):
        assert record.image.shape == (8, 6, 3) and record.label == label
        low, high, seven = np.unique(record.image.reshape(-1, 3), axis=0)[0]
        assert seven == 7 and {IMAGENET[one] for one in label} == {int(low) + 256 * int(high)}


def test_what_counts_as_right_is_as_published(source):
    logits = np.random.default_rng(0).standard_normal((len(source), 1000))
    for row, label in zip(logits, source.labels, strict=True):
        row[np.random.default_rng(label[0]).integers(1000)] += 3
        if label[0] % 3 == 0:
            row[label[-1]] += 9
    relabelled = with_classes(source, tuple(f"class {i}" for i in range(1000)))
    found = np.zeros(2)
    for index, row in enumerate(logits):
        target = np.zeros(1000)
        target[list(relabelled[index].label)] = 1
        best = np.argsort(-row)[:5]
        found += target[best[0]], target[best].any()
    expected = np.zeros(2)
    scored = [number for number in range(CLASSES) if number in IMAGENET.values()]
    for number, row in zip(scored, logits, strict=True):
        best = [IMAGENET.get(int(one)) for one in np.argsort(-row)[:5]]
        expected += best[0] == number, number in best
    assert (found == expected).all() and 20 < found[0] < found[1] < 113


def test_a_folder_without_all_classes_is_refused(tmp_path):
    images(tmp_path / "objectnet", 3)
    with pytest.raises(ConfigError, match="has 3 class folders, and ObjectNet has 313"):
        sources.open_eval(section(tmp_path / "objectnet"))


def test_a_model_of_other_classes_is_refused(source):
    with pytest.raises(ConfigError, match="the data has 1000 classes, the model 3"):
        with_classes(source, ("ant", "bee", "cat"))
