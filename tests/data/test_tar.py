import io
import json
import pickle
import tarfile

import cv2
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data


def image(value):
    return cv2.imencode(".png", np.full((4, 5, 3), value, np.uint8))[1].tobytes()


def write_tar(path, members, mode="w"):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))


def config(path, **fields):
    return Data(name="tar", path=str(path), holdout=0.0, **fields)


def refusal(path, split="train"):
    with pytest.raises(ConfigError) as raised:
        sources.open_source(config(path), split)
    return str(raised.value)


def test_webdataset_shards_give_images_with_the_label_beside_them(tmp_path):
    for shard in range(3):
        members = {}
        for i in range(4):
            key = f"{shard:03d}{i:03d}"
            members |= {f"{key}.png": image(10 * shard + i), f"{key}.cls": str(i % 3).encode()}
            members |= {f"{key}.json": b'{"caption": "no label"}', f"{key}.txt": b"a caption"}
        write_tar(tmp_path / f"set-train-{shard:06d}.tar", members)
    write_tar(tmp_path / "set-val-000000.tar", {"x.jpg": image(99), "x.cls": b"2"})
    source = sources.open_source(config(tmp_path), "train")
    assert len(source) == 12 and source.classes == ("0", "1", "2") and not source.multi_label
    again = pickle.loads(pickle.dumps(source))
    for index in (0, 5, 11):
        assert source[index].image == image(10 * (index // 4) + index % 4) == again[index].image
        assert source[index].label == index % 4 % 3
    assert source[5].name == f"{tmp_path}/set-train-000001.tar, 001001.png"
    assert sources.open_source(config(tmp_path), "test")[0].image == image(99)
    for pattern in ("set-train-*.tar", "set-train-{000000..000002}.tar"):
        assert len(sources.open_source(config(tmp_path / pattern), "train")) == 12
    assert "there is no tar file" in refusal(tmp_path / "set-train-{000000..000003}.tar")
    assert "; did you mean '" in refusal(tmp_path / "set-train-00001.tar")


def test_json_labels_may_be_names_and_several(tmp_path):
    labels = {"a": ["dog", "cat"], "b": [], "c": ["emu"]}
    members = {}
    for key, label in labels.items():
        members |= {f"{key}.jpg": image(1), f"{key}.json": json.dumps({"label": label}).encode()}
    write_tar(tmp_path / "x.tar", members)
    source = sources.open_source(config(tmp_path / "x.tar"), "train")
    assert source.multi_label and source.classes == ("cat", "dog", "emu")
    assert [source[i].label for i in range(3)] == [(1, 0), (), (2,)]
    (tmp_path / "classes.txt").write_text("emu\ndog\ncat\n")
    assert sources.open_source(config(tmp_path / "x.tar"), "train")[0].label == (1, 2)


def test_folders_inside_are_classes_and_splits(tmp_path):
    names = ["set/train/cat/1.png", "set/train/dog/1.b.png", "set/val/dog/2.png"]
    write_tar(tmp_path / "x.tar", {name: image(i) for i, name in enumerate(names)})
    source = sources.open_source(config(tmp_path / "x.tar"), "train")
    assert source.classes == ("cat", "dog") and source.labels.tolist() == [0, 1]
    assert sources.open_source(config(tmp_path / "x.tar"), "val[:1]")[0].image == image(2)


def test_tar_files_named_after_wordnet_are_classes_as_imagenet_distributes_them(tmp_path):
    for name in ("n01440764", "n02102040"):
        write_tar(tmp_path / f"{name}.tar", {f"{name}_{i}.JPEG": image(i) for i in range(3)})
    source = sources.open_source(config(tmp_path), "train")
    assert source.classes == ("n01440764", "n02102040")
    assert source.labels.tolist() == [0, 0, 0, 1, 1, 1] and source[4].image == image(1)


def test_tar_errors_name_the_file(tmp_path):
    write_tar(tmp_path / "some.tar", {"1.png": image(1), "2.png": image(2), "2.cls": b"0"})
    assert "some.tar, 1.png has no label, but " in refusal(tmp_path / "some.tar")
    write_tar(tmp_path / "bad.tar", {"1.png": image(1), "1.json": b"{"})
    assert "bad.tar cannot be read" in refusal(tmp_path / "bad.tar")
    write_tar(tmp_path / "packed.tar", {"a/1.png": image(1), "b/1.png": image(1)}, "w:gz")
    assert "packed.tar cannot be read as an uncompressed tar file" in refusal(
        tmp_path / "packed.tar"
    )
    write_tar(tmp_path / "text.tar", {"1.txt": b"x"})
    assert "has no images" in refusal(tmp_path / "text.tar")


def test_a_npy_file_is_the_image_unless_there_is_a_picture_beside_it(tmp_path):
    file = io.BytesIO()
    np.save(file, np.zeros((4, 5, 7), np.uint8))
    members = {"a.jpg": image(1), "a.npy": file.getvalue(), "a.cls": b"0"}
    members |= {"b.npy": file.getvalue(), "b.cls": b"1"}
    write_tar(tmp_path / "train.tar", members)
    source = sources.open_source(config(tmp_path), "train")
    assert [source[i].name.rpartition(" ")[2] for i in range(len(source))] == ["a.jpg", "b.npy"]
    assert source[1].image == file.getvalue()


def test_members_that_are_not_used_are_counted_by_their_types(tmp_path, caplog):
    members = {f"{i}.png": image(i) for i in range(3)} | {f"{i}.nef": b"" for i in range(4)}
    write_tar(tmp_path / "train.tar", members | {"list.txt": b"x"})
    assert len(sources.open_source(config(tmp_path), "train")) == 3
    assert "5 files are not used" in caplog.text and "4 .nef, 1 .txt" in caplog.text


def test_masks_of_images_in_a_tar_file_are_asked_about(tmp_path):
    members = {f"{i}{end}.png": image(i) for i in range(2) for end in ("", ".seg", ".left")}
    write_tar(tmp_path / "a.tar", members | {f"{i}.cls": b"0" for i in range(2)})
    assert "2 images are named like masks" in refusal(tmp_path / "a.tar")
    source = sources.open_source(config(tmp_path / "a.tar", mask_files="keep"), "train")
    assert len(source) == 6
