"""Zip files of images, which are read where they are, as tar files are."""

import pickle
import zipfile

import cv2
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.index import index
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.record import BadImage


def png(value):
    return cv2.imencode(".png", np.full((4, 5, 3), value, np.uint8))[1].tobytes()


def write(path, members, compression=zipfile.ZIP_DEFLATED):
    with zipfile.ZipFile(path, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def opened(path, split="train", name="folder"):
    return sources.open_source(Data(name=name, path=str(path), holdout=0.0), split)


@pytest.mark.parametrize("compression", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("name", ["folder", "tar"])
def test_class_folders_and_splits_in_a_zip_file_are_read(compression, name, tmp_path):
    names = [f"set/{split}/{c}/{i}.png" for split in ("Train", "Valid") for c in "ab" for i in "12"]
    members = {file: png(i) for i, file in enumerate(names)} | {"__MACOSX/set/._1.png": b"x"}
    write(tmp_path / "a.zip", members | {"set/Train/": b"", "readme.txt": b"x"}, compression)
    train, test = (opened(tmp_path / "a.zip", split, name) for split in ("train", "test"))
    assert train.classes == ("a", "b") and train.labels.tolist() == [0, 0, 1, 1]
    assert [train[i].image for i in (3, 0)] == [png(3), png(0)]
    assert [record.image for record in test.read(range(4))] == [png(i) for i in range(4, 8)]
    assert pickle.loads(pickle.dumps(train))[2] == train[2]
    assert train[0].name == f"{tmp_path}/a.zip, set/Train/a/1.png"


def test_labels_beside_images_in_a_zip_file_are_read_and_it_is_prepared(tmp_path):
    members = {f"{i}.png": png(i) for i in range(4)} | {
        f"{i}.cls": b"ab"[i % 2 :][:1] for i in range(4)
    }
    write(tmp_path / "a.zip", members)
    result = prepare(str(tmp_path / "a.zip"), str(tmp_path / "out"), holdout=0.0)
    assert result["classes"] == 2 and result["splits"] == {"train": 4}
    assert index(str(tmp_path / "a.zip"))["records"] == 4
    stored = opened(tmp_path / "out", name="prepared")
    assert sorted(stored[i].image for i in range(4)) == sorted(png(i) for i in range(4))


def test_zip_files_that_cannot_be_read_say_why(tmp_path):
    (tmp_path / "bad.zip").write_bytes(b"PK no zip")
    with pytest.raises(ConfigError, match="bad.zip cannot be read as a zip file"):
        opened(tmp_path / "bad.zip")
    write(tmp_path / "packed.zip", {"a/1.png": png(1), "b/1.png": png(1)}, zipfile.ZIP_LZMA)
    with pytest.raises(ConfigError, match="a/1.png is compressed by another method"):
        opened(tmp_path / "packed.zip")
    write(tmp_path / "cut.zip", {"a/1.png": png(1) * 50, "b/1.png": png(2)})
    content = bytearray((tmp_path / "cut.zip").read_bytes())
    start = content.index(b"a/1.png") + len("a/1.png")
    content[start : start + 20] = bytes(range(235, 255))
    (tmp_path / "cut.zip").write_bytes(content)
    with pytest.raises(BadImage, match="cut.zip, a/1.png cannot be read"):
        opened(tmp_path / "cut.zip")[0]
