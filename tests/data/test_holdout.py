"""Which images are held out: the same for ever, however they are spelled and wherever they lie."""

import io
import json
import os
import tarfile

import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data

# A fifth of cat/0.jpg … dog/19.jpg, as the first version chose it.
HELD_OUT = [
    "cat/1.jpg",
    "cat/3.jpg",
    "cat/5.jpg",
    "cat/8.jpg",
    "cat/18.jpg",
    "dog/0.jpg",
    "dog/6.jpg",
]
FILES = [f"{label}/{i}.jpg" for label in ("cat", "dog") for i in range(20)]


def opened(path, split="test", *, name="folder", **fields):
    config = Data(name=name, path=str(path), **{"holdout": 0.2} | fields)
    return sources.open_source(config, split)


def touch(root, files=FILES):
    for file in files:
        (root / file).parent.mkdir(parents=True, exist_ok=True)
        (root / file).touch()


def write_csv(path, files):
    rows = "".join(f"{file},{'cat' if 'cat' in file else 'dog'}\n" for file in files)
    path.write_text("path,label\n" + rows)
    return path


def test_folders_lists_and_tar_files_hold_out_what_the_first_version_did(tmp_path):
    touch(tmp_path)
    assert list(opened(tmp_path).paths) == HELD_OUT
    assert list(opened(write_csv(tmp_path / "a.csv", FILES)).paths) == HELD_OUT
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for file in FILES:
            info = tarfile.TarInfo(file)
            info.size = 1
            tar.addfile(info, io.BytesIO(b"x"))
    inside = opened(tmp_path / "a.tar", name="tar")
    names = [record.name.partition(", ")[2] for record in inside.read(range(len(inside)))]
    assert names == HELD_OUT


def test_what_identifies_a_set_that_is_being_prepared_is_as_in_the_first_version(tmp_path):
    touch(tmp_path)
    data_set = sources.open_data_set(Data(name="folder", path=str(tmp_path), holdout=0.2))
    assert data_set.identity() == "7de5b202138bf714c832ba546816158dd823763eb813f4a78cdf873028b97562"


@pytest.mark.parametrize(
    "spell",
    [
        "./{}".format,
        lambda file: file.replace("/", "//"),
        lambda file: f"x/../{file}",
        lambda file: f"../set/{file}",
        lambda file: os.path.abspath(f"set/{file}"),
        lambda file: os.path.abspath(f"link/{file}"),
    ],
    ids=["dot", "slashes", "up and down", "from above", "absolute", "absolute by a link"],
)
def test_a_list_holds_out_the_same_images_however_it_spells_them(spell, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    touch(tmp_path / "set")
    for file in FILES:
        (tmp_path / "set" / file).write_bytes(b"an image")
    (tmp_path / "link").symlink_to("set")
    (tmp_path / "set/x").mkdir()
    for path in ("set", "link", "./set/../set"):
        path = tmp_path / path / "a.csv"
        source = opened(write_csv(path, map(spell, FILES)))
        assert [os.path.realpath(source[i].name) for i in range(len(source))] == [
            str(tmp_path / "set" / file) for file in HELD_OUT
        ]


def test_a_moved_list_of_absolute_paths_leaks_no_image_into_the_test(tmp_path):
    held_out = []
    for place in ("one", "two/three"):
        touch(tmp_path / place / "images")
        (tmp_path / place / "lists").mkdir()
        files = [f"{tmp_path}/{place}/images/{file}" for file in FILES]
        source = opened(write_csv(tmp_path / place / "lists/a.csv", files))
        held_out.append([path.removeprefix(f"{tmp_path}/{place}") for path in source.paths])
    assert held_out[0] == held_out[1] and held_out[0]


# By class


def by_class(root, **fields):
    return opened(root, holdout_by="class", **fields)


def counts(source):
    return [source.labels.tolist().count(label) for label in range(len(source.classes))]


def test_by_class_the_same_share_of_every_class_is_held_out(tmp_path):
    files = [
        f"{label}/{i}.jpg"
        for label, n in (("a", 50), ("b", 10), ("c", 2), ("d", 1))
        for i in range(n)
    ]
    touch(tmp_path, files)
    train, test = by_class(tmp_path, split="train"), by_class(tmp_path)
    # At least one on each side where there are two.
    assert counts(test) == [10, 2, 1, 0] and counts(train) == [40, 8, 1, 1]
    assert sorted((*train.paths, *test.paths)) == sorted(files)
    assert counts(by_class(tmp_path, split="train", holdout=0.0)) == [50, 10, 2, 1]


def test_by_class_new_images_move_few_others_and_none_of_other_classes(tmp_path):
    touch(tmp_path, [f"{label}/{i}.jpg" for label in "ab" for i in range(100)])
    before = set(by_class(tmp_path).paths)
    touch(tmp_path, [f"a/{i}.jpg" for i in range(100, 110)])
    after = set(by_class(tmp_path).paths)
    old = {path for path in after if int(path[2:-4]) < 100}
    assert {path for path in before if path[0] == "b"} == {path for path in after if path[0] == "b"}
    assert len(before ^ old) <= 10 and len(after) == 42


def test_by_class_needs_one_label_for_each_image(tmp_path):
    touch(tmp_path, [f"{i}.jpg" for i in range(4)])
    with pytest.raises(ConfigError, match="'class' needs one label for each image.*have none"):
        by_class(tmp_path)
    lines = (json.dumps({"path": f"{i}.jpg", "label": ["a", "b"]}) for i in range(4))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="have several: hold out by 'file'"):
        by_class(tmp_path / "a.jsonl")


@pytest.mark.parametrize("asked", ["test", "val", "validation"])
def test_the_held_out_split_has_three_names(tmp_path, asked):
    assert list(opened(write_csv(tmp_path / "a.csv", FILES), asked).paths) == HELD_OUT
