"""Folders with links, and with names that are no text."""

import json
import os

import cv2
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.prediction.images import find_images


def opened(path, split="train", **fields):
    return sources.open_source(
        Data(name="folder", path=str(path), **{"holdout": 0.0} | fields), split
    )


@pytest.fixture
def animals(tmp_path):
    """cat/0.jpg … dog/deeper/4.jpg, ten empty files each."""
    for label in ("cat", "dog"):
        (tmp_path / "set" / label / "deeper").mkdir(parents=True)
        for i in range(5):
            (tmp_path / "set" / label / f"{i}.jpg").touch()
            (tmp_path / "set" / label / "deeper" / f"{i}.jpg").touch()
    return tmp_path / "set"


@pytest.mark.parametrize(
    "link, target",
    [
        ("dog/loop", ".."),
        ("dog/loop", "."),
        ("dog/deeper/loop", "../.."),
        ("loop", "."),
        ("dog/x", "/"),
    ],
)
def test_links_back_do_not_multiply_images_and_are_said(link, target, animals, caplog):
    whole = opened(animals)
    (animals / link).symlink_to(target)
    source = opened(animals)
    assert source.paths == whole.paths and len(source) == 20
    assert "1 links lead back to a folder that contains them" in caplog.text


def test_a_folder_is_visited_once_in_a_class_and_by_its_own_name(animals):
    whole = opened(animals)
    (animals / "dog/again").symlink_to("deeper")
    (animals / "dog/0").symlink_to(animals / "dog/deeper")
    assert opened(animals).paths == whole.paths


def test_links_to_other_folders_and_to_files_are_followed(animals, tmp_path):
    (tmp_path / "elsewhere/more").mkdir(parents=True)
    (tmp_path / "elsewhere/more/1.jpg").touch()
    (animals / "dog/linked").symlink_to(tmp_path / "elsewhere")
    (animals / "emu").symlink_to(tmp_path / "elsewhere/more")
    (animals / "cat/linked.jpg").symlink_to(tmp_path / "elsewhere/more/1.jpg")
    source = opened(animals)
    assert len(source) == 23 and source.classes == ("cat", "dog", "emu")
    assert {"dog/linked/more/1.jpg", "emu/1.jpg", "cat/linked.jpg"} <= set(source.paths)


def test_classes_that_hold_each_other_end(animals):
    (animals / "cat/all").symlink_to("../dog")
    (animals / "dog/all").symlink_to("../cat")
    assert len(opened(animals)) == 40


@pytest.fixture
def misnamed(tmp_path):
    """Class folders with names in Latin-1."""
    image = cv2.imencode(".png", np.zeros((6, 5, 3), np.uint8))[1].tobytes()
    for label in (b"K\xe4se", b"Brot"):
        folder = os.path.join(os.fsencode(tmp_path), b"s\xe4tze", label)
        os.makedirs(folder)
        for i in range(20):
            with open(os.path.join(folder, b"caf\xe9%d.png" % i), "wb") as file:
                file.write(image)
    return tmp_path / os.fsdecode(b"s\xe4tze")


def test_file_names_that_are_not_utf_8_are_read_and_printed_with_their_bytes(misnamed):
    train, test = opened(misnamed, holdout=0.2), opened(misnamed, "test", holdout=0.2)
    assert len(train) + len(test) == 40 and 2 <= len(test) <= 16
    assert train.classes == ("Brot", r"K\xe4se")
    assert train[0].name.endswith("/Brot/caf\\xe90.png") and train.fingerprint()
    train[0].name.encode()


def test_file_names_that_are_not_utf_8_are_prepared(misnamed, tmp_path):
    os.remove(os.path.join(os.fsencode(misnamed), b"Brot/caf\xe95.png"))
    os.symlink("nowhere", os.path.join(os.fsencode(misnamed), b"Brot/caf\xe95.png"))
    result = prepare(str(misnamed), str(tmp_path / "out"), holdout=0.0)
    assert result["splits"] == {"train": 39} and result["bad"] == 1
    stored = sources.open_source(Data(name="prepared", path=str(tmp_path / "out")), "train")
    assert stored.classes == ("Brot", r"K\xe4se")
    assert stored[0].name == rf"{tmp_path}/out, Brot/caf\xe90.png"
    line = json.loads((tmp_path / "out/report.jsonl").read_text())
    assert line["name"] == r"Brot/caf\xe95.png"


def test_files_that_are_not_used_are_counted_by_their_types(animals, caplog):
    for name in (
        "cat/IMG_1.NEF",
        "cat/IMG_2.nef",
        "dog/deeper/raw.CR2",
        "dog/notes.txt",
        "a.dng",
    ):
        (animals / name).touch()
    assert len(opened(animals)) == 20
    for part in ("5 files are not used", "2 .nef, 1 .cr2, 1 .dng, 1 .txt", "a.dng"):
        assert part in caplog.text
    assert [r.levelname for r in caplog.records if "are not used" in r.message] == ["WARNING"]


def test_files_that_are_no_pictures_are_counted_without_a_warning(animals, caplog):
    caplog.set_level("INFO")
    (animals / "dog/notes.txt").touch()
    opened(animals)
    assert "skipped: 1 .txt" in caplog.text
    assert {record.levelname for record in caplog.records} == {"INFO"}


def test_a_folder_of_photos_of_a_phone_says_what_it_has(tmp_path):
    for i in range(3):
        (tmp_path / f"IMG_{i}.NEF").touch()
    with pytest.raises(ConfigError, match="has 3 .nef"):
        opened(tmp_path)


def test_hidden_folders_and_those_of_file_systems_are_no_examples_in_training_and_prediction(
    animals,
):
    whole = opened(animals).paths
    for name in (".thumbnails", "@eaDir", "#recycle", "lost+found", "__MACOSX", ".git/a"):
        (animals / "cat/deeper" / name).mkdir(parents=True)
        (animals / "cat/deeper" / name / "1.jpg").touch()
    (animals / "__MACOSX").mkdir()
    (animals / "__MACOSX/1.jpg").touch()
    (animals / "#beach").mkdir()
    (animals / "#beach/1.jpg").write_bytes(b"x")
    assert set(opened(animals).paths) == {*whole, "#beach/1.jpg"}
    predicted = [os.path.relpath(image.name, animals) for image in find_images([str(animals)])]
    assert set(predicted) == {*whole, "#beach/1.jpg"}
