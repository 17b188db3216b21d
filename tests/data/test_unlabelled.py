"""Images without labels: which sources have none, and what becomes of them."""

import io
import json
import pickle
import tarfile

import cv2
import jax
import numpy as np
import pytest

from vit_jax.base.errors import ConfigError
from vit_jax.config import default_config
from vit_jax.data import batches, loader, sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare, text
from vit_jax.data.preparation.verify import verify
from vit_jax.devices import meshes


def png(value: int) -> bytes:
    return cv2.imencode(".png", np.full((6, 5, 3), value, np.uint8))[1].tobytes()


def write(folder, *names):
    for i, name in enumerate(names):
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(png(i))


def opened(path, split="train", *, name="folder", **fields):
    return sources.open_source(Data(name=name, path=str(path), **{"holdout": 0.0} | fields), split)


def flat_folder(root):
    write(root, *(f"{i}.png" for i in range(40)))
    return "folder", root


def csv_file(root):
    flat_folder(root)
    (root / "list.csv").write_text("path\n" + "".join(f"{i}.png\n" for i in range(40)))
    return "folder", root / "list.csv"


def json_lines(root):
    flat_folder(root)
    lines = (json.dumps({"path": f"{i}.png", "caption": "a cat"}) for i in range(40))
    (root / "list.jsonl").write_text("\n".join(lines))
    return "folder", root / "list.jsonl"


def tar_file(root):
    root.mkdir(exist_ok=True)
    with tarfile.open(root / "x.tar", "w") as tar:
        for i in range(40):
            info = tarfile.TarInfo(f"./{i}.png")  # as in `tar -cf x.tar .`
            info.size = len(png(i))
            tar.addfile(info, io.BytesIO(png(i)))
    return "tar", root / "x.tar"


KINDS = (flat_folder, csv_file, json_lines, tar_file)


@pytest.mark.parametrize("kind", KINDS)
def test_every_source_may_be_without_labels_and_holds_out_by_file_name(kind, tmp_path):
    name, path = kind(tmp_path)
    train, test = (opened(path, split, name=name, holdout=0.2) for split in ("train", "test"))
    assert train.classes == test.classes == () and not train.multi_label
    assert train.labels is None and train[0].label is None
    assert len(train) + len(test) == 40 and 3 <= len(test) <= 15
    seen = {source[i].image for source in (train, test) for i in range(len(source))}
    assert seen == {png(i) for i in range(40)}
    again = pickle.loads(pickle.dumps(train))
    assert again[3] == train[3] and again.fingerprint() == train.fingerprint()


@pytest.mark.parametrize("kind", KINDS)
def test_sets_without_labels_are_prepared_and_verified(kind, tmp_path):
    _, path = kind(tmp_path / "in")
    result = prepare(str(path), str(tmp_path / "out"), holdout=0.2)
    assert result["classes"] == 0 and sum(result["splits"].values()) == 40
    assert "images without labels" in text(result)
    assert verify(str(tmp_path / "out")) == {"examples": 40, "bad": []}
    stored = opened(tmp_path / "out", name="prepared")
    assert stored.classes == () and stored.labels is None and stored[0].label is None


def test_flat_folders_of_splits_have_no_labels(tmp_path):
    write(tmp_path, "train/1.png", "train/2.png", "val/3.png")
    assert opened(tmp_path).paths == ("train/1.png", "train/2.png")
    assert opened(tmp_path, "test").paths == ("val/3.png",) and opened(tmp_path).classes == ()


def test_tar_files_of_nothing_but_splits_have_no_labels(tmp_path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        for name in ("train/1.png", "train/2.png", "test/3.png"):
            tar.addfile(tarfile.TarInfo(name))
    assert len(opened(tmp_path / "x.tar", name="tar")) == 2
    assert opened(tmp_path / "x.tar", "test", name="tar").classes == ()


def test_images_beside_class_folders_are_left_out_and_said(tmp_path, caplog):
    write(tmp_path, "cat/1.png", "dog/1.png", "stray.png", "another.png")
    assert opened(tmp_path).paths == ("cat/1.png", "dog/1.png")
    assert "2 images lie beside the class folders and are skipped, the first is" in caplog.text
    prepare(str(tmp_path), str(tmp_path.parent / "out"))
    report = [
        json.loads(x) for x in (tmp_path.parent / "out/report.jsonl").read_text().splitlines()
    ]
    assert [one["name"] for one in report] == ["another.png", "stray.png"]
    assert {one["what"] for one in report} == {"ignored"}


def test_a_split_without_class_folders_is_left_out_and_said_where_another_has_them(
    tmp_path, caplog
):
    write(tmp_path, "train/cat/1.png", "train/dog/1.png", "test/1.png")
    assert opened(tmp_path).classes == ("cat", "dog")
    assert "1 images lie beside the class folders" in caplog.text and "test/1.png" in caplog.text


def test_some_labels_are_refused_with_the_place_where_one_is_missing(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"path": "1.png", "label": "cat"}\n\n{"path": "2.png"}\n')
    with pytest.raises(ConfigError, match=r"a.jsonl, line 3 has no label, but .*line 1 has one"):
        opened(tmp_path / "a.jsonl")


def test_a_mistyped_label_column_is_not_taken_for_none(tmp_path):
    (tmp_path / "a.csv").write_text("path,lable\n1.png,cat\n")
    with pytest.raises(ConfigError, match="path and label, not 'path,lable'; or with path alone"):
        opened(tmp_path / "a.csv")


def test_a_mixture_with_a_set_without_labels_has_none(tmp_path):
    flat_folder(tmp_path / "flat")
    entries = (("digits", 1), (str(tmp_path / "flat"), 1))
    source = sources.open_train(Data(name="mixture", mixture=entries, holdout=0.0))
    assert (
        source.classes == () and source[0].label is None and source[len(source) - 1].label is None
    )


def test_batches_have_no_label_where_the_source_has_none(tmp_path):
    _, path = flat_folder(tmp_path)
    config = default_config()
    config.batch_size = 8
    data = {"name": "folder", "path": str(path), "image_size": 4, "eval_crop": "resize"}
    config.data.update(data | {"holdout": 0.1})
    mesh = meshes.make_mesh({"data": -1, "fsdp": 1, "tensor": 1})
    sharding = meshes.batch_sharding(mesh)
    source = opened(path, holdout=0.1)
    spec = batches.spec(config, num_classes=0)
    with loader.train_batches(source, config, sharding, start_step=0, stop_step=2) as train:
        for batch in train:
            shapes = {n: jax.ShapeDtypeStruct(x.shape, x.dtype) for n, x in batch.items()}
            assert shapes == spec and set(spec) == {"image"}
    with loader.eval_batches(source, config, sharding) as evaluated:
        batch = list(evaluated)[-1]
    assert set(batch) == {"image", "mask"} and batch["mask"].sum() == (len(source) - 1) % 8 + 1
