"""Labels that are most likely a mistake: said, with what to do about it."""

import dataclasses
import json
import re

import cv2
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.recipes.user_files import load_config
from vit_jax.training.assembly import assemble, resolve


def write_csv(path, labels):
    path.write_text("path,label\n" + "".join(f"{i}.png,{one}\n" for i, one in enumerate(labels)))
    return Data(name="folder", path=str(path), holdout=0.0)


def assemble_digits(num_classes, **fields):
    config = load_config("configs/digits.py")
    config.update_from_flattened_dict(fields)
    return assemble(
        resolve(config), num_classes=num_classes, examples_per_epoch=100, multi_label=True
    )


def test_numbers_with_huge_gaps_are_no_class_numbers(tmp_path):
    config = write_csv(tmp_path / "a.csv", [0, 10**6, 2 * 10**6])
    with pytest.raises(ConfigError) as raised:
        sources.open_train(config)
    told = str(raised.value)
    assert "3 numbers up to 2000000, which would make 2000001 classes" in told
    assert "give them names" in told and f"{tmp_path}/classes.txt" in told
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(2_000_001))))
    assert len(sources.open_train(config).classes) == 2_000_001


@pytest.mark.parametrize("labels", [[0, 999], [0, 1, 2, 400], range(0, 21_843, 100)])
def test_a_few_images_of_a_large_set_have_few_of_its_classes(tmp_path, labels):
    source = sources.open_train(write_csv(tmp_path / "a.csv", labels))
    assert len(source.classes) == max(labels) + 1


def test_classes_without_images_to_train_on_are_named_once(tmp_path, caplog):
    config = write_csv(tmp_path / "a.csv", [1, 2, 3, 1])
    assert len(sources.open_train(config).classes) == 4
    assert (
        "1 of 4 classes have no images in 'train': '0'; do the labels count from 1?" in caplog.text
    )
    caplog.clear()
    sources.open_train(write_csv(tmp_path / "a.csv", [0, 1, 2]))
    sources.open_eval(Data(name="folder", path=config.path, eval_split="train[:1]"))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    sources.open_train(write_csv(tmp_path / "a.csv", [0, 9]))
    assert "8 of 10 classes have no images in 'train': '1', '2', '3', '4', '5', …" in caplog.text


def test_they_are_found_in_prepared_and_in_multi_label_sets_too(tmp_path, caplog):
    lines = []
    for i, labels in enumerate((["0"], ["2", "0"], [])):
        cv2.imwrite(str(tmp_path / f"{i}.png"), np.full((4, 4, 3), i, np.uint8))
        lines.append(json.dumps({"path": f"{i}.png", "label": labels}))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    sources.open_train(Data(name="folder", path=str(tmp_path / "a.jsonl"), holdout=0.0))
    assert "1 of 3 classes have no images in 'train': '1'" in caplog.text
    caplog.clear()
    write_csv(tmp_path / "a.csv", [0, 2, 2])
    prepare(str(tmp_path / "a.csv"), str(tmp_path / "out"), holdout=0.0)
    sources.open_train(Data(name="prepared", path=str(tmp_path / "out")))
    assert "1 of 3 classes have no images in 'train': '1'" in caplog.text


def test_several_labels_are_not_learned_with_a_softmax():
    with pytest.raises(
        ConfigError, match="the softmax loss is for one: set --config.objective.loss"
    ):
        assemble_digits(10)
    assert assemble_digits(10, **{"objective.loss": "sigmoid"}).multi_label


def test_one_class_is_refused_where_labels_are_needed(tmp_path):
    config = write_csv(tmp_path / "a.csv", ["cat", "cat"])
    assert sources.open_train(config).classes == ("cat",)
    with pytest.raises(ConfigError, match="needs two or more classes, and 'digits' .* only one"):
        assemble_digits(1)


def test_prepared_labels_are_known_without_reading_records(tmp_path):
    labels = [0, 1, 1, 0, 2, 1, 0]
    for i in range(7):
        cv2.imwrite(str(tmp_path / f"{i}.png"), np.full((4, 4, 3), i, np.uint8))
    (tmp_path / "3.png").write_bytes(b"no image")  # left out
    write_csv(tmp_path / "a.csv", labels)
    prepare(str(tmp_path / "a.csv"), str(tmp_path / "out"), holdout=0.0, num_shards=2)
    config = Data(name="prepared", path=str(tmp_path / "out"))
    source = sources.open_source(config, "train[1:]+train[:2]")
    assert (
        source.labels.tolist()
        == [source[i].label for i in range(len(source))]
        == [1, 1, 2, 1, 0, 0, 1]
    )
    for path in (tmp_path / "out").glob("*.array_record"):
        path.unlink()
    assert sources.open_source(config, "train[1:]+train[:2]").labels.tolist() == [
        1,
        1,
        2,
        1,
        0,
        0,
        1,
    ]


def test_sets_prepared_by_an_earlier_version_have_no_file_of_labels(tmp_path):
    for i in range(4):
        cv2.imwrite(str(tmp_path / f"{i}.png"), np.full((4, 4, 3), i, np.uint8))
    write_csv(tmp_path / "a.csv", [0, 1, 0, 1])
    prepare(str(tmp_path / "a.csv"), str(tmp_path / "out"), holdout=0.0)
    path = tmp_path / "out/dataset.json"
    description = json.loads(path.read_text())
    del description["splits"]["train"]["labels"]
    path.write_text(json.dumps(description))
    config = Data(name="prepared", path=str(tmp_path / "out"))
    assert sources.open_train(config).labels is None and sources.open_train(config)[1].label == 1
    config = Data(name="prepared", path=str(tmp_path / "out"), sampling="balanced")
    with pytest.raises(ConfigError, match="store the data set again with 'vit_jax prepare'"):
        sources.open_train(config)


def written(path, texts, column="labels"):
    """A CSV file of labels."""
    rows = (f'{i}.png,"{text}"\n' for i, text in enumerate(texts))
    path.write_text(f"path,{column}\n" + "".join(rows))
    return Data(name="folder", path=str(path), holdout=0.0)


@pytest.mark.parametrize("separator", ["|", ",", " ", "/"])
def test_labels_are_separated_by_the_text_that_is_set(separator, tmp_path):
    texts = ["sky", f"sea{separator}tree", f"tree{separator}sky", f"sky{separator}sea"]
    config = written(tmp_path / "a.csv", texts)
    if separator != "/":
        with pytest.raises(ConfigError, match=f"label_separator='{re.escape(separator)}'.*=none"):
            sources.open_train(config)
    source = sources.open_train(dataclasses.replace(config, label_separator=separator))
    assert source.classes == ("sea", "sky", "tree")
    assert source.labels == ((1,), (0, 2), (2, 1), (1, 0))
    source = sources.open_train(dataclasses.replace(config, label_separator="none"))
    assert len(source.classes) == 4 and source.multi_label


def test_labels_with_spaces_and_commas_are_names_of_classes_as_ever(tmp_path):
    names = ["red car", "red bus", "blue car", "blue bus", "tench, Tinca tinca", "tench"]
    assert len(sources.open_train(written(tmp_path / "a.csv", names, "label")).classes) == 6
    source = sources.open_train(written(tmp_path / "b.csv", ["golden retriever;cat", "big dog"]))
    assert source.classes == ("big dog", "cat", "golden retriever")
    with pytest.raises(ConfigError, match="label_separator"):
        sources.open_train(written(tmp_path / "c.csv", ["a|b", "a", "b"], "label"))


@pytest.mark.parametrize(
    "vector",
    ["[0 1 1]", "[0, 1, 1]", "[0., 1., 1.]", "[False, True, True]"],
)
def test_vectors_of_zeros_and_ones_are_classes(vector, tmp_path):
    other = vector.replace("1", "2").replace("0", "1").replace("2", "0")
    other = "[True, False, False]" if "True" in vector else other
    source = sources.open_train(written(tmp_path / "a.csv", [vector, other]))
    assert source.classes == ("0", "1", "2") and source.labels == ((1, 2), (0,))
    (tmp_path / "classes.txt").write_text("sky\nsea\ntree\n")
    source = sources.open_train(written(tmp_path / "a.csv", [vector, other]))
    assert source.classes == ("sky", "sea", "tree") and source.labels == ((1, 2), (0,))
    (tmp_path / "classes.txt").write_text("sky\nsea\n")
    with pytest.raises(ConfigError, match="vectors of 3 numbers, .* 2 names"):
        sources.open_train(written(tmp_path / "a.csv", [vector, other]))


@pytest.mark.parametrize(
    "lists, classes, labels",
    [
        ([[0, 0, 1], [0, 0, 0]], 3, ((2,), ())),
        ([[1, 0], [0, 1]], 2, ((0,), (1,))),  # as numbers, each image would have both classes
        ([[0, 1], [1]], 2, ((0, 1), (1,))),
        ([[0, 2], [1, 2]], 3, ((0, 2), (1, 2))),
        ([[0], [1]], 2, ((0,), (1,))),
    ],
)
def test_lists_of_numbers_are_vectors_only_if_they_cannot_be_class_numbers(
    lists, classes, labels, tmp_path
):
    lines = (json.dumps({"path": f"{i}.png", "labels": row}) for i, row in enumerate(lists))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    source = sources.open_train(Data(name="folder", path=str(tmp_path / "a.jsonl"), holdout=0.0))
    assert len(source.classes) == classes and source.labels == labels


def test_probabilities_in_a_list_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="line 2: the labels 0.2, 0.8 are probabilities"):
        sources.open_train(written(tmp_path / "a.csv", ["[0.2, 0.8]", "[1, 0]"]))


def test_numbers_with_fractions_are_classes_only_if_they_are_named(tmp_path):
    config = write_csv(tmp_path / "a.csv", ["0.7", "1.25", "0.7"])
    with pytest.raises(
        ConfigError, match="line 2: the labels 0.7, 1.25 are numbers with fractions"
    ):
        sources.open_train(config)
    (tmp_path / "classes.txt").write_text("1.25\n0.7\n")
    assert sources.open_train(config).labels.tolist() == [1, 0, 1]


def test_labels_whose_accents_are_stored_in_two_ways_are_one_class(tmp_path):
    composed, decomposed = "c\u00e1scara", "ca\u0301scara"
    config = written(tmp_path / "a.csv", [composed, decomposed, "moss"], "label")
    source = sources.open_train(config)
    assert len(source.classes) == 2 and source.labels[0] == source.labels[1] != source.labels[2]
    (tmp_path / "classes.txt").write_text(f"moss\n{decomposed}\n", "utf-8")
    source = sources.open_train(config)
    assert source.classes == ("moss", decomposed) and source.labels.tolist() == [1, 1, 0]


def test_a_tab_separates_labels_and_other_signs_may(tmp_path):
    rows = ["sea\ttree", "sea", "tree"]
    (tmp_path / "a.csv").write_text("path,labels\n" + "".join(f"{r}.png,{r}\n" for r in rows))
    with pytest.raises(ConfigError, match=r"label_separator=\$'\\t' if they are several"):
        sources.open_data_set(Data(name="folder", path=str(tmp_path / "a.csv")))
    rows = ["sea+tree", "sea", "tree", "sky+sea"]
    (tmp_path / "a.csv").write_text("path,labels\n" + "".join(f"{r}.png,{r}\n" for r in rows))
    with pytest.raises(ConfigError, match=r"separated by '\+'"):
        sources.open_data_set(Data(name="folder", path=str(tmp_path / "a.csv")))


def test_several_columns_of_splits_are_a_question(tmp_path):
    rows = "".join(f"{i}.png,a,{s},{s}\n" for i, s in enumerate(["train", "test"]))
    (tmp_path / "a.csv").write_text("path,label,fold,set\n" + rows)
    with pytest.raises(ConfigError, match="the columns fold, set all name splits"):
        sources.open_data_set(Data(name="folder", path=str(tmp_path / "a.csv")))
