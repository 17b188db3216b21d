import pickle
import re
import shutil
import subprocess
import sys

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

from vit_jax.base.errors import ConfigError
from vit_jax.data import splits
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage
from vit_jax.data.sources import OPENERS, open_eval, open_source, open_train
from vit_jax.data.sources.table import natural

from .tiny_tfds import write_tfds


def data_config(name, path="", **fields):
    return Data(name=name, path=str(path), **fields)


def write_image(path, value=128):
    path.parent.mkdir(parents=True, exist_ok=True)
    assert cv2.imwrite(str(path), np.full((6, 5, 3), value, np.uint8))


def refusal(config, split="train"):
    with pytest.raises(ConfigError) as raised:
        open_source(config, split)
    return str(raised.value)


# splits


@pytest.mark.parametrize(
    "expression, parts",
    [
        ("train", [("train", 0, 1000)]),
        ("train[:99%]", [("train", 0, 990)]),
        ("train[10:]", [("train", 10, 1000)]),
        ("train[-25:]", [("train", 975, 1000)]),
        ("train[-10%:-1%]", [("train", 900, 990)]),
        ("train[:1]+test[1%:50%]", [("train", 0, 1), ("test", 0, 4)]),
    ],
)
def test_split_expressions_mean_what_tfds_says(expression, parts):
    assert splits.select(expression, {"train": 1000, "test": 7}, "here") == parts


def test_percentages_cut_without_gap_or_overlap():
    for size in (151, 999, 1281167):
        _, _, end = splits.select("train[:99%]", {"train": size}, "here")[0]
        _, start, _ = splits.select("train[99%:]", {"train": size}, "here")[0]
        assert end == start


@pytest.mark.parametrize(
    "expression, words",
    [
        ("trian", "no split 'trian'; it has: train, test"),
        ("train[5:5]", "is empty"),
        ("test", "split 'test' of here is empty"),
        ("train[:2000]", "beyond the 1000 examples"),
        ("train[-2000:]", "beyond the 1000 examples"),
        ("train[a:]", "not of the form"),
    ],
)
def test_impossible_splits_are_refused(expression, words):
    with pytest.raises(ConfigError) as raised:
        splits.select(expression, {"train": 1000, "test": 0}, "here")
    assert words in str(raised.value)


# digits


def test_digits_are_split_once_and_for_all_with_the_same_share_of_every_class():
    config = data_config("digits")
    train, test = open_train(config), open_eval(config)
    labels = load_digits().target
    assert (len(train), len(test)) == (1438, 359)
    assert np.array_equal(np.sort(np.concatenate([train.ids, test.ids])), np.arange(1797))
    assert np.abs(np.bincount(test.labels) / np.bincount(labels) - 0.2).max() < 0.005
    assert test.ids[:8].tolist() == open_eval(config).ids[:8].tolist()
    assert len(train.classes) == 10


def test_digits_are_grey_rgb_of_eight_bits():
    source = open_source(data_config("digits"), "train+test")
    record = source[1500]
    number = source.ids[1500]
    expected = np.round(load_digits().images[number] * 255 / 16)
    assert record.image.dtype == np.uint8 and record.image.shape == (8, 8, 3)
    assert np.array_equal(record.image, np.repeat(expected[..., None], 3, axis=2))
    assert record.name == f"digits/{number}" and record.label == load_digits().target[number]


# folders


def test_class_folders_are_sorted_naturally_and_files_read_lazily(tmp_path):
    for name in ("c10", "c9", "c1"):
        for file in ("a10.png", "a2.JPG", "deeper/x.bmp", "x.webp", "notes.txt", ".hidden.png"):
            path = tmp_path / name / file
            write_image(path) if not file.endswith("txt") else path.write_text("no image")
    source = open_source(data_config("folder", tmp_path, holdout=0.0), "train")
    assert source.classes == ("c1", "c9", "c10")
    assert source.paths[:4] == ("c1/a2.JPG", "c1/a10.png", "c1/deeper/x.bmp", "c1/x.webp")
    assert source.labels.tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert source[5].image == (tmp_path / "c9/a10.png").read_bytes()
    assert source[5].label == 1 and source[5].name == str(tmp_path / "c9/a10.png")
    (tmp_path / "c9/a10.png").unlink()
    with pytest.raises(BadImage, match="a10.png cannot be read: there is no such file"):
        source[5]
    assert np.array_equal(pickle.loads(pickle.dumps(source)).labels, source.labels)


def test_natural_order_compares_numbers_as_numbers_and_the_rest_as_text():
    def parts(name):
        split = re.split(r"(\d+)", name)
        return [int(part) if i % 2 else part for i, part in enumerate(split)], name

    random = np.random.default_rng(0)
    names = {"".join(random.choice(list("ab0129.é٣"), random.integers(0, 8))) for _ in range(3000)}
    names |= {"1" * 250, "1" * 249, "9" * 249, "img_2.jpg", "img_10.jpg", "img_02.jpg"}
    assert sorted(names, key=natural) == sorted(names, key=parts)


def test_the_held_out_part_is_a_share_by_name_and_new_files_move_no_old_one(tmp_path):
    for label in ("cat", "dog"):
        (tmp_path / label).mkdir()
        for i in range(500):
            (tmp_path / label / f"{i}.jpg").touch()
    config = data_config("folder", tmp_path, holdout=0.2)
    train, test = open_train(config), open_eval(config)
    assert len(train) + len(test) == 1000 and not set(train.paths) & set(test.paths)
    assert abs(len(test) - 200) < 4 * np.sqrt(1000 * 0.2 * 0.8)
    for i in range(500, 600):
        (tmp_path / "cat" / f"{i}.jpg").touch()
    assert set(test.paths) <= set(open_eval(config).paths)
    assert set(train.paths) <= set(open_train(config).paths)


@pytest.mark.parametrize("held_out", ["test", "val", "validation"])
def test_folders_of_splits_are_recognised_and_share_the_classes_of_train(tmp_path, held_out):
    for path in ("train/a/1.png", "train/b/1.png", "train/c/1.png", f"{held_out}/c/1.png"):
        write_image(tmp_path / path)
    config = data_config("folder", tmp_path)
    assert open_train(config).labels.tolist() == [0, 1, 2]
    test = open_eval(config)
    assert test.classes == ("a", "b", "c") and test.labels.tolist() == [2]
    assert len(open_source(config, held_out)) == 1


def test_a_class_may_be_called_train(tmp_path):
    write_image(tmp_path / "train/1.png")
    write_image(tmp_path / "plane/1.png")
    assert open_source(data_config("folder", tmp_path, holdout=0.0), "train").classes == (
        "plane",
        "train",
    )


def test_folder_errors_say_what_is_wrong_and_where(tmp_path):
    assert "config.data.path is empty" in refusal(data_config("folder"))
    assert "does not exist" in refusal(data_config("folder", tmp_path / "nowhere"))
    (tmp_path / "set").mkdir()
    assert f"; did you mean '{tmp_path}/set'?" in refusal(data_config("folder", tmp_path / "sets"))
    (tmp_path / "set").rmdir()
    assert "has neither images (.jpg" in refusal(data_config("folder", tmp_path))
    write_image(tmp_path / "cat/1.png")
    (tmp_path / "dog").mkdir()
    assert "dog has no images" in refusal(data_config("folder", tmp_path))
    write_image(tmp_path / "dog/1.png")
    assert "is empty" in refusal(data_config("folder", tmp_path, holdout=0.0), "test")
    assert "it has: train, test" in refusal(data_config("folder", tmp_path), "dev")
    split = tmp_path / "split"
    for path in ("train/a/1.png", "train/b/1.png", "test/new/1.png"):
        write_image(split / path)
    assert "class folder 'new', which the training images lack" in refusal(
        data_config("folder", split)
    )


# CSV


def write_csv(path, text):
    path.write_text(text, encoding="utf-8")
    return data_config("folder", path, holdout=0.0)


def test_csv_labels_are_numbers_or_names_and_paths_relative_to_its_folder(tmp_path):
    write_image(tmp_path / "images/1.png")
    config = write_csv(
        tmp_path / "labels.csv", 'path,label,note\nimages/1.png,2,"x, y"\nimages/2.png,0,\n'
    )
    source = open_source(config, "train")
    assert source.classes == ("0", "1", "2") and source.labels.tolist() == [2, 0]
    assert source[0].image == (tmp_path / "images/1.png").read_bytes()
    named = open_source(
        write_csv(tmp_path / "named.csv", "label,path\ndog,1.png\ncat,2.png\ndog,3.png\n"), "train"
    )
    assert named.classes == ("cat", "dog") and named.labels.tolist() == [1, 0, 1]
    (tmp_path / "classes.txt").write_text("zebra\ncat\ndog\n")
    assert open_source(config, "train").classes == ("zebra", "cat", "dog")
    assert open_source(
        data_config("folder", tmp_path / "named.csv", holdout=0.0), "train"
    ).labels.tolist() == [2, 1, 2]


def test_csv_may_name_its_splits(tmp_path):
    config = write_csv(
        tmp_path / "a.csv", "path,label,split\n1.png,a,train\n2.png,b,dev\n3.png,b,train\n"
    )
    assert open_source(config, "train").paths == ("1.png", "3.png")
    assert open_source(config, "dev").labels.tolist() == [1]
    assert open_source(config, "test").paths == ("2.png",)  # what there is to judge by
    assert "it has: train, val, test" in refusal(config, "extra")


@pytest.mark.parametrize(
    "text, words",
    [
        (
            "file,class\n1.png,0\n",
            "must begin with the column names path and label, not 'file,class'",
        ),
        ("path,label\n1.png,0\n2.png\n", "line 3: 2 values are needed"),
        ("path,label\n1.png,0\n2.png,1,x\n", "line 3: 2 values are needed"),
        ("path,label\n1.png,0\n2.png,\n", "line 3: 2 values are needed"),
        (
            "path,label\n1.png,-1\n2.png,1\n",
            "line 2: the label '-1' is out of range: there are 2 classes, 0 to 1",
        ),
        ("path,label\n", "lists no images"),
    ],
)
def test_wrong_csv_lines_are_named(tmp_path, text, words):
    assert words in refusal(write_csv(tmp_path / "a.csv", text))


def test_labels_beyond_classes_txt_are_named(tmp_path):
    (tmp_path / "classes.txt").write_text("cat\ndog\n")
    assert "line 3: the label '2' is out of range" in refusal(
        write_csv(tmp_path / "a.csv", "path,label\n1,1\n2,2\n")
    )
    assert "line 2: the label 'cow' is out of range" in refusal(
        write_csv(tmp_path / "a.csv", "path,label\n1,cow\n")
    )


def test_real_images_are_read_by_csv(shared_data, tmp_path):
    folder = shared_data / "imagenet_sample"
    lines = (folder / "labels.csv").read_text().splitlines()[1:]
    text = "path,label\n" + "".join(
        f"{folder}/{line.split(',')[0]},{line.split(',')[2]}\n" for line in lines
    )
    source = open_source(write_csv(tmp_path / "a.csv", text), "train")
    assert (
        len(source) == 200
        and len(source.classes) == 996
        and source.labels[:3].tolist() == [0, 5, 10]
    )
    assert source[199].image == (folder / lines[199].split(",")[0]).read_bytes()


# TFDS


@pytest.fixture
def tfds():
    import tensorflow_datasets

    return tensorflow_datasets


def single_label(tfds):
    names = ["cat", "dog", "emu"]
    return {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "label": tfds.features.ClassLabel(names=names),
        "coarse": tfds.features.ClassLabel(names=["pet", "bird"]),
        "file_name": tfds.features.Text(),
    }


def test_tfds_array_records_are_read_with_labels_and_names(tfds, tmp_path):
    examples = [
        {"label": [i % 3], "coarse": [0], "file_name": f"{i}.png".encode()} for i in range(10)
    ]
    image = write_tfds(tmp_path / "toy/1.0.0", single_label(tfds), examples)
    source = open_source(data_config("toy", tmp_path), "train[20%:]")
    assert source.classes == ("cat", "dog", "emu") and len(source) == 8 and not source.multi_label
    records = [source[7], source[0]]
    assert [record.label for record in records] == [0, 2] and records[0].image == image
    assert records[1].name == "toy/1.0.0 train[2:10], record 0 (2.png)"
    again = pickle.loads(pickle.dumps(source))
    assert again[3] == source[3] and len(again) == 8


def test_tfds_label_sequences_make_a_multi_label_source(tfds, tmp_path):
    names = tfds.features.ClassLabel(names=["a", "b", "c"])
    features = {
        "image": tfds.features.Image(shape=(None, None, 3)),
        "original_label": names,
        "real_label": tfds.features.Sequence(names),
    }
    examples = [{"original_label": [1], "real_label": labels} for labels in ([0, 2], [], [1])]
    write_tfds(tmp_path / "toy/1.0.0", features, examples)
    source = open_source(data_config("toy", tmp_path), "train")
    assert source.multi_label and len(source.classes) == 3
    assert [source[i].label for i in range(3)] == [(0, 2), (), (1,)]


def test_tfds_takes_the_newest_version_unless_told(tfds, tmp_path):
    for version in ("1.0.0", "1.10.0", "1.9.0"):
        write_tfds(
            tmp_path / "toy" / version,
            single_label(tfds),
            [{"label": [0], "coarse": [0], "file_name": b"x"}],
        )
    assert "toy/1.10.0 " in open_source(data_config("toy", tmp_path), "train")[0].name
    assert "toy/1.9.0 " in open_source(data_config("toy:1.9.0", tmp_path), "train")[0].name
    shutil.move(tmp_path / "toy", tmp_path / "base" / "big")
    assert "has variants, base/VARIANT; there are: big" in refusal(data_config("base", tmp_path))


def test_what_tfds_can_prepare_is_no_mistyped_name_of_something_else(tfds, tmp_path):
    """dtd is a part of the name vtab/dtd, and mnist is not in our table."""
    for name in ("dtd", "mnist", "sun397/tfds", "cifar10:3.0.2"):
        said = refusal(data_config(name, tmp_path))
        assert "did you mean" not in said and f"vit_jax prepare {name} --out=DIR" in said


def test_imagenet21k_is_prepared_by_hand_and_the_error_says_how(tmp_path):
    said = refusal(data_config("imagenet21k", tmp_path))
    assert "is not in TFDS" in said and "fall11_whole.tar" in said and "vit_jax prepare" in said


def test_data_sets_that_are_not_there_are_errors_with_the_nearest_name(tfds, tmp_path):
    said = refusal(data_config("digit", tmp_path))
    assert (
        f"'digit' is not prepared in {tmp_path}; did you mean 'digits'?" in said
        and "vit_jax prepare digit" in said
    )
    (tmp_path / "c10.tar").touch()
    said = refusal(data_config("cifar10", tmp_path / "c10.tar"))
    assert "c10.tar, which is a file: of a tar file set --config.data.name=tar" in said
    write_tfds(
        tmp_path / "toy/1.0.0",
        single_label(tfds),
        [{"label": [0], "coarse": [0], "file_name": b"x"}],
    )
    assert "did you mean 'toy'?" in refusal(data_config("toys", tmp_path))
    assert "no split 'test'; it has: train" in refusal(data_config("toy", tmp_path), "test")


def test_tfds_data_sets_that_cannot_be_used_are_refused(tfds, tmp_path):
    image, name = (
        tfds.features.Image(shape=(None, None, 3)),
        tfds.features.ClassLabel(names=["a", "b"]),
    )
    write_tfds(
        tmp_path / "two/1.0.0",
        {"image": image, "size": name, "hue": name},
        [{"size": [0], "hue": [0]}],
    )
    assert "needs one class label, or one called label or labels" in refusal(
        data_config("two", tmp_path)
    )


def test_a_tfds_data_set_without_class_labels_has_no_labels(tfds, tmp_path):
    features = {"image": tfds.features.Image(shape=(None, None, 3)), "text": tfds.features.Text()}
    write_tfds(tmp_path / "toy/1.0.0", features, [{"text": b"a"}, {"text": b"b"}])
    source = open_source(data_config("toy", tmp_path), "train")
    assert source.classes == () and source[1].label is None and len(source) == 2


def test_reading_tfds_imports_no_tensorflow(tfds, tmp_path):
    write_tfds(
        tmp_path / "toy/1.0.0",
        single_label(tfds),
        [{"label": [0], "coarse": [0], "file_name": b"x"}],
    )
    program = f"""
import sys
from vit_jax.data.options import Data
from vit_jax.data.sources import open_source
assert len(open_source(Data(name="toy", path={str(tmp_path)!r}), "train")[0].image) > 50
assert "tensorflow" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_every_registered_source_is_tested():
    """'prepared' in preparation/test_prepare.py, 'tar' and 'mixture' in test_tar.py and
    test_mixture.py, 'masks' and 'digit_scenes' in test_masks.py, 'digit_things' in
    test_segments.py, 'pairs', 'digit_pairs' and 'digit_scene_pairs' in test_pairs.py, 'objectnet' in
    tests/evaluation/test_objectnet.py; the others here.
    """
    assert set(OPENERS) == {
        "digits", "digits_few", "folder", "prepared", "tar", "mixture", "objectnet",
        "masks", "digit_scenes", "digit_things", "pairs", "digit_pairs", "digit_scene_pairs",
    }  # fmt: skip
