"""What a data set is recognised by when a run is resumed."""

import json
import os

import cv2
import numpy as np
import pytest

from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.sources.folder import ImageFiles

from .tiny_tfds import write_tfds


def fingerprint(path, *, name="folder", split="train", **fields):
    config = Data(name=name, path=str(path), train_split=split, **{"holdout": 0.0} | fields)
    return sources.open_train(config).fingerprint()


@pytest.fixture
def animals(tmp_path):
    """set/cat and set/dog with ten images of noise each."""
    random = np.random.default_rng(0)
    for label in ("cat", "dog"):
        (tmp_path / "set" / label).mkdir(parents=True)
        for i in range(10):
            image = random.integers(0, 256, (8 + i, 8, 3), np.uint8)
            cv2.imwrite(str(tmp_path / "set" / label / f"{i}.png"), image)
    return tmp_path / "set"


def test_it_is_the_same_wherever_the_set_lies_and_however_often_it_is_asked(animals, tmp_path):
    before = fingerprint(animals)
    assert fingerprint(animals) == before == fingerprint(f"{animals}/../set")
    moved = animals.rename(tmp_path / "moved")
    assert fingerprint(moved) == before and fingerprint(moved, threads=3) == before


def swap(one, other):
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "cat/3.png").rename(root / "dog/30.png"),
        lambda root: swap(root / "cat/3.png", root / "dog/4.png"),
        lambda root: (root / "cat").rename(root / "cow"),
        lambda root: (root / "cat/3.png").rename(root / "cat/03.png"),
        lambda root: cv2.imwrite(str(root / "dog/9.png"), np.zeros((9, 9, 3), np.uint8)),
    ],
    ids=["moved to another class", "exchanged", "class renamed", "file renamed", "re-encoded"],
)
def test_it_differs_when_images_are_moved_exchanged_or_changed(change, animals):
    before = fingerprint(animals)
    change(animals)
    assert fingerprint(animals) != before


def test_one_image_of_very_many_in_another_class_is_found():
    paths = tuple(f"{i}.jpg" for i in range(20_000))
    labels = np.arange(20_000, dtype=np.int32) // 10_000
    other = labels.copy()
    other[3] = 1
    one, two = (ImageFiles("/nowhere", ("a", "b"), False, paths, x) for x in (labels, other))
    assert one.fingerprint() != two.fingerprint()


def test_of_a_million_files_no_more_than_a_thousand_are_looked_at(tmp_path, monkeypatch):
    paths = tuple(f"class/{i}.jpg" for i in range(1_000_000))
    looked_at = []
    exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: looked_at.append(path) or exists(path))
    several = tuple((0, 1) for _ in range(1_000_000))
    for labels in (np.zeros(1_000_000, np.int32), several, None):
        looked_at.clear()
        ImageFiles(str(tmp_path), ("a", "b"), labels is several, paths, labels).fingerprint()
        assert 0 < len(looked_at) <= 1000


def test_prepared_sets_are_known_by_their_checksums(animals, tmp_path):
    prepare(str(animals), str(tmp_path / "a"), holdout=0.0)
    prepare(str(animals), str(tmp_path / "b"), holdout=0.0)
    (animals / "cat/3.png").write_bytes((animals / "cat/4.png").read_bytes())
    prepare(str(animals), str(tmp_path / "c"), holdout=0.0)
    a, b, c = (fingerprint(tmp_path / name, name="prepared") for name in "abc")
    assert a == b != c
    assert fingerprint(tmp_path / "a", name="prepared", split="train[:5]") != a


def test_tfds_sets_are_known_by_name_version_and_sizes(tmp_path):
    import tensorflow_datasets as tfds

    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=["a", "b"]),
    }
    for folder, version, count in (
        ("a", "1.0.0", 4),
        ("b", "1.0.0", 4),
        ("c", "1.0.1", 4),
        ("d", "1.0.0", 5),
    ):
        write_tfds(tmp_path / folder / "toy" / version, features, [{"label": [0]}] * count)
    a, b, c, d = (
        fingerprint(tmp_path / folder, name="toy", split="train[:4]") for folder in "abcd"
    )
    assert a == b and len({a, c, d}) == 3


def test_every_other_source_has_one_that_differs_with_its_examples(animals, tmp_path):
    lines = [json.dumps({"path": f"cat/{i}.png", "label": ["a"] * (i % 2)}) for i in range(10)]
    (animals / "a.jsonl").write_text("\n".join(lines))
    lines[3] = json.dumps({"path": "cat/3.png", "label": []})
    (animals / "b.jsonl").write_text("\n".join(lines))
    assert fingerprint(animals / "a.jsonl") != fingerprint(animals / "b.jsonl")
    os.system(f"tar -cf {tmp_path}/a.tar -C {animals} cat dog")
    tar = fingerprint(tmp_path / "a.tar", name="tar")
    assert tar != fingerprint(tmp_path / "a.tar", name="tar", split="train[1:]")
    mixtures = [
        fingerprint("", name="mixture", mixture=(("digits", 1), (str(animals), weight)))
        for weight in (1, 2)
    ]
    assert mixtures[0] != mixtures[1]
    assert fingerprint("", name="digits") != fingerprint("", name="digits", split="train[:99%]")
