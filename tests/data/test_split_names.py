"""Which names stand for splits, and what becomes of data where no split is to judge by."""

import io
import tarfile

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.sources.split_names import find_splits, splits_of_files


@pytest.mark.parametrize(
    "names, splits",
    [
        (["Train", "Valid"], {"Train": "train", "Valid": "val"}),
        (["training_set", "test_set"], {"training_set": "train", "test_set": "test"}),
        (["Train Data", "TestData"], {"Train Data": "train", "TestData": "test"}),
        (["plants_train", "plants_test", "x"], {"plants_train": "train", "plants_test": "test"}),
        (["train", "val", "validation"], {n: n for n in ("train", "val", "validation")}),
        (["trainval", "hold_out"], {"trainval": "train", "hold_out": "test"}),
        (["train", "valid", "val"], {"train": "train", "val": "val", "valid": "valid"}),
        (["test", "cat"], {"test": "test"}),  # of lower case, as ever
        (["Test", "cat"], {}),
        (["valid", "invalid"], {}),
        (["toy_train", "test_tube"], {}),
        (["training"], {"training": "train"}),
    ],
)
def test_names_of_splits_are_understood_in_pairs(names, splits):
    assert find_splits(names) == splits


def test_words_in_the_names_of_tar_files_are_splits_in_other_spellings_if_both_sides_are_there():
    assert splits_of_files(["x-Train-0.tar", "x-VALID-0.tar"]) == ["train", "val"]
    assert splits_of_files(["x-train-0.tar", "dev-1.tar"]) == ["train", "val"]
    assert splits_of_files(["x-Train-0.tar", "x-Train-1.tar"]) == ["", ""]
    assert splits_of_files(["x-val-0.tar", "x.tar"]) == ["val", ""]


def touch(root, *names):
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def images(folder):
    return [f"{folder}/{name}/{i}.png" for name in ("fern", "moss") for i in range(20)]


def as_folder(root):
    touch(root, *images("train"), "test/0.png", "test/1.png")
    return "folder", root


def as_list(root):
    rows = (f"{name},{name.split('/')[1]},train\n" for name in images("train"))
    (root / "a.csv").write_text("path,label,split\n" + "".join(rows))
    return "folder", root / "a.csv"


def as_tar(root):
    with tarfile.open(root / "a.tar", "w") as tar:
        for name in images("train"):
            info = tarfile.TarInfo(name)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    return "tar", root / "a.tar"


@pytest.mark.parametrize("make", [as_folder, as_list, as_tar])
def test_where_no_split_is_to_judge_by_a_share_of_train_is_held_out_by_option(make, tmp_path):
    name, path = make(tmp_path)
    config = Data(name=name, path=str(path), holdout=0.25, holdout_by="class")
    assert len(sources.open_train(config)) == 40
    with pytest.raises(ConfigError, match=r"holdout_from=train"):
        sources.open_eval(config)
    config = Data(**{**vars(config), "holdout_from": "train"})
    train, test = sources.open_train(config), sources.open_eval(config)
    assert train.classes == test.classes == ("fern", "moss")
    assert (len(train), len(test)) == (30, 10)


def test_the_option_changes_nothing_where_a_split_is_to_judge_by(tmp_path):
    touch(tmp_path, *images("train"), *images("Valid"))
    config = Data(name="folder", path=str(tmp_path), holdout_from="train")
    assert len(sources.open_train(config)) == len(sources.open_eval(config)) == 40


def test_two_names_for_train_in_a_list_are_refused(tmp_path):
    (tmp_path / "a.csv").write_text("path,label,split\n1.png,a,train\n2.png,b,Train\n3.png,a,val\n")
    with pytest.raises(ConfigError, match="'train', 'Train'"):
        sources.open_train(Data(name="folder", path=str(tmp_path / "a.csv")))
