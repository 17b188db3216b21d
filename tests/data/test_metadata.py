"""Image folders as the Hugging Face hub has them, and files that are given instead of a list."""

import json

import cv2
import numpy as np
import pytest

from tests import lazily
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare

datasets = lazily.Package("datasets")


def opened(root, split="train", **fields):
    return sources.open_source(
        Data(name="folder", path=str(root), **{"holdout": 0.0} | fields), split
    )


def write(root, name, rows):
    """Touches images, and lists them with their labels."""
    root.mkdir(parents=True, exist_ok=True)
    for file, _ in rows:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()
    if name.endswith(".csv"):
        text = "file_name,label\n" + "".join(f"{file},{label}\n" for file, label in rows)
    else:
        lines = (json.dumps({"file_name": file, "label": label}) for file, label in rows)
        text = "\n".join(lines)
    (root / name).write_text(text)


@pytest.mark.parametrize("name", ["metadata.csv", "metadata.jsonl"])
def test_metadata_in_the_folders_of_splits_has_the_labels(name, tmp_path):
    write(tmp_path / "train", name, [("0.png", "fern"), ("1.png", "moss")])
    write(tmp_path / "validation", name, [("0.png", "moss")])
    (tmp_path / "train/unlisted.png").touch()
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert train.paths == ("train/0.png", "train/1.png") and train.labels.tolist() == [0, 1]
    assert test.paths == ("validation/0.png",) and test.labels.tolist() == [1]


NAMES = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", ["beside each split", "no splits"])
def test_image_folders_are_read_as_datasets_reads_them(name, place, tmp_path):
    root = tmp_path / "set"
    files = [f"train/{i}.png" for i in range(5)] + [f"test/a/{i}.png" for i in range(3)]
    if place == "no splits":
        files = [f"pictures/{i}.png" for i in range(8)]
    for i, file in enumerate(files):
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(root / file), np.full((4, 4, 3), 20 * i, np.uint8))
    folders = ("train", "test") if place == "beside each split" else ("",)
    for folder in folders:
        within = [file for file in files if file.startswith(folder)]
        table = datasets.Dataset.from_dict(
            {
                "file_name": [file.removeprefix(f"{folder}/") for file in within],
                "caption": ["what is seen"] * len(within),
                "label": [("fern", "moss")[files.index(file) % 2] for file in within],
            }
        )
        path = root / folder / name
        if name.endswith(".csv"):
            table.to_csv(path)
        elif name.endswith(".jsonl"):
            table.to_json(path)
        else:
            table.to_parquet(path)
    theirs = datasets.load_dataset("imagefolder", data_dir=str(root), cache_dir=str(tmp_path / "c"))
    for split in theirs:
        source = opened(root, split)
        undecoded = theirs[split].cast_column("image", datasets.Image(decode=False))
        expected = {row["image"]["path"]: row["label"] for row in undecoded}
        labels = [source.classes[number] for number in source.labels]
        paths = [str(root / path) for path in source.paths]
        assert dict(zip(paths, labels, strict=True)) == expected


def test_one_list_for_all_images_has_the_splits_of_their_folders(tmp_path, caplog):
    rows = [("Train/a/0.png", "fern"), ("Train/b/1.png", "moss"), ("./Test/2.png", "moss")]
    write(tmp_path, "metadata.csv", rows)
    (tmp_path / "Test/3.png").touch()
    with caplog.at_level("INFO", logger="absl"):
        assert opened(tmp_path).labels.tolist() == [0, 1]
    assert opened(tmp_path, "test").paths == ("Test/2.png",)
    assert "2 classes from metadata.csv: fern (1 + 0), moss (1 + 1)" in caplog.text
    assert "1 images that the metadata does not list" in caplog.text


def test_one_list_without_splits_is_held_out_of_and_given_itself(tmp_path):
    write(tmp_path, "metadata.jsonl", [(f"pictures/{i}.png", i % 3) for i in range(9)])
    for path in (tmp_path, tmp_path / "metadata.jsonl"):
        source = opened(path, holdout=0.34, holdout_by="class")
        assert len(source) == 6 and source.classes == ("0", "1", "2")


def test_listed_files_that_are_not_there_are_named(tmp_path):
    write(tmp_path, "metadata.csv", [("0.png", "a"), ("1.png", "b")])
    (tmp_path / "1.png").unlink()
    with pytest.raises(ConfigError, match=r"metadata.csv, line 3: '1.png' .* 1 of 2"):
        opened(tmp_path)


def test_captions_beside_class_folders_change_nothing(tmp_path):
    write(tmp_path, "metadata.csv", [("a/0.png", "x"), ("b/0.png", "y")])
    text = (tmp_path / "metadata.csv").read_text()
    (tmp_path / "metadata.csv").write_text(text.replace("label", "caption"))
    assert opened(tmp_path).classes == ("a", "b")


def test_a_folder_with_metadata_is_prepared_and_the_rest_is_reported(tmp_path):
    write(tmp_path / "in", "metadata.csv", [("0.png", "a"), ("1.png", "b")])
    for name in ("0.png", "1.png"):
        (tmp_path / "in" / name).write_bytes(b"no image")
    (tmp_path / "in/2.txt").touch()
    with pytest.raises(ConfigError, match="none of the images"):
        prepare(str(tmp_path / "in"), str(tmp_path / "out"), holdout=0.0)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("labels.xlsx", "save it as CSV"),
        ("photos.RAR", "unpack it"),
        ("photos.tar.gz", "uncompress it"),
        ("data.npz", "write the images as files"),
    ],
)
def test_other_files_than_lists_are_refused_by_name_with_what_to_do(name, words, tmp_path):
    (tmp_path / name).write_bytes(b"PK\x03\x04\x92")
    with pytest.raises(ConfigError, match=words):
        opened(tmp_path / name)
