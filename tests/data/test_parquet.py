"""Parquet files as the Hugging Face hub has data sets of images."""

import io
import json
import pickle
import tarfile
import threading
import time

import cv2
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from tests import lazily
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.record import BadImage
from vit_jax.data.sources import parquet

datasets = lazily.Package("datasets")

NAMES = ("disc", "square", "triangle")


def png(value):
    return cv2.imencode(".png", np.full((4, 5, 3), value, np.uint8))[1].tobytes()


def write(path, labels, names=NAMES, *, group=100, feature=None, **columns):
    """A file as `datasets` writes it: a struct of bytes and path, and the features in the schema's metadata."""
    images = [{"bytes": png(i % 250), "path": f"{i}.png"} for i in range(len(labels))]
    struct = pyarrow.struct([("bytes", pyarrow.binary()), ("path", pyarrow.string())])
    table = pyarrow.table({"image": pyarrow.array(images, struct), "label": labels, **columns})
    feature = feature or {"names": list(names), "_type": "ClassLabel"}
    features = {"image": {"_type": "Image"}, "label": feature}
    metadata = {"huggingface": json.dumps({"info": {"features": features if names else {}}})}
    path.parent.mkdir(parents=True, exist_ok=True)
    table = table.replace_schema_metadata(metadata)
    pyarrow.parquet.write_table(table, path, row_group_size=group)


def opened(root, split="train", **fields):
    return sources.open_source(
        Data(name="folder", path=str(root), **{"holdout": 0.0} | fields), split
    )


def test_a_data_set_of_the_hub_is_read_with_its_splits_and_the_names_of_its_classes(tmp_path):
    for i in range(2):
        write(tmp_path / f"data/train-0000{i}-of-00002.parquet", [0, 1, 2, 1, 0], group=2)
    write(tmp_path / "data/validation-00000-of-00001.parquet", [2, 2])
    train, test = opened(tmp_path), opened(tmp_path, "test")
    assert train.classes == test.classes == NAMES and not train.multi_label
    assert train.labels.tolist() == [0, 1, 2, 1, 0] * 2 and test.labels.tolist() == [2, 2]
    order = [7, 0, 4, 7]
    assert [record.image for record in train.read(order)] == [png(2), png(0), png(4), png(2)]
    assert train[6].label == 1 and train[6].name.endswith("train-00001-of-00002.parquet, row 1")
    again = pickle.loads(pickle.dumps(train))
    assert again[9] == train[9] and again.fingerprint() == train.fingerprint()


def test_rows_are_read_by_any_number_of_threads(tmp_path):
    write(tmp_path / "train.parquet", [i % 3 for i in range(60)], group=7)
    source, wrong = opened(tmp_path), []

    def read(seed):
        indices = np.random.default_rng(seed).permutation(60).tolist()
        records = source.read(indices)
        wrong.extend(
            i for i, record in zip(indices, records, strict=True) if record.image != png(i)
        )

    threads = [threading.Thread(target=read, args=[seed]) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_one_file_without_a_split_is_held_out_of_and_prepared(tmp_path):
    write(tmp_path / "all.parquet", [i % 3 for i in range(30)])
    source = opened(tmp_path / "all.parquet", holdout=0.2, holdout_by="class")
    assert len(source) == 24 and source.classes == NAMES
    result = prepare(str(tmp_path / "all.parquet"), str(tmp_path / "out"), holdout=0.0)
    assert result["splits"] == {"train": 30, "test": 0} or result["splits"] == {"train": 30}
    assert result["classes"] == 3 and not result["bad"]


def test_labels_may_be_texts_numbers_or_several(tmp_path):
    write(tmp_path / "a/train.parquet", ["moss", "fern", "moss"], ())
    assert opened(tmp_path / "a").classes == ("fern", "moss")
    write(tmp_path / "b/train.parquet", [0, 2, 1], ())
    assert opened(tmp_path / "b").classes == ("0", "1", "2")
    several = {"feature": {"names": list(NAMES), "_type": "ClassLabel"}, "_type": "List"}
    write(tmp_path / "c/train.parquet", [[0, 2], [], [1]], feature=several)
    source = opened(tmp_path / "c")
    assert source.classes == NAMES and source.labels == ((0, 2), (), (1,))


def test_a_split_whose_labels_are_secret_is_skipped_and_named(tmp_path, caplog):
    write(tmp_path / "train.parquet", [0, 1, 2])
    write(tmp_path / "test.parquet", [-1, -1])
    with caplog.at_level("INFO", logger="absl"):
        assert len(opened(tmp_path)) == 3
    assert "skipped: 2 rows of test without a label" in caplog.text
    with pytest.raises(ConfigError, match="holdout_from=train"):
        opened(tmp_path, "test")


def test_what_cannot_be_read_is_refused_with_the_reason(tmp_path):
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(ConfigError, match="cannot be read as a Parquet file"):
        opened(tmp_path / "bad.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"x": [1]}), tmp_path / "x.parquet")
    with pytest.raises(ConfigError, match="0 columns of images .* among x"):
        opened(tmp_path / "x.parquet")
    table = pyarrow.table({"image": pyarrow.array([png(1), None], pyarrow.binary())})
    pyarrow.parquet.write_table(table, tmp_path / "null.parquet")
    source = opened(tmp_path / "null.parquet")
    assert source.classes == () and source[0].image == png(1)
    with pytest.raises(BadImage, match="null.parquet, row 1 cannot be read: the row has no image"):
        source[1]


def test_class_folders_beside_a_parquet_file_are_read_as_ever(tmp_path):
    write(tmp_path / "boxes.parquet", [0])
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "0.png").touch()
    assert opened(tmp_path).classes == ("a", "b")


def test_compressed_pages_that_are_too_large_to_keep_are_warned_of(tmp_path, caplog, monkeypatch):
    write(tmp_path / "train.parquet", [0] * 1200, group=1200)
    opened(tmp_path)
    assert "in random order" not in caplog.text  # all pages are kept
    monkeypatch.setattr(parquet, "_KEPT", 1000)
    source = opened(tmp_path)
    assert "1200 images are decompressed for each one in random order" in caplog.text
    assert [source[i].image for i in (1199, 3)] == [png(1199 % 250), png(3)]


def of_datasets(count, first=0):
    """A data set of the library `datasets`."""
    features = {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    rows = range(first, first + count)
    images = [{"bytes": png(i % 250), "path": f"{i}.png"} for i in rows]
    return datasets.Dataset.from_dict(
        {"image": images, "label": [i % 3 for i in rows]}, features=datasets.Features(features)
    )


def test_what_datasets_wrote_is_what_it_reads(tmp_path):
    for split, count in (("train", 25), ("validation", 8)):
        for i in range(2):
            shard = of_datasets(count).shard(2, i)
            path = tmp_path / f"set/data/{split}-0000{i}-of-00002.parquet"
            path.parent.mkdir(parents=True, exist_ok=True)
            shard.to_parquet(path)
    for split, own in (("train", "train"), ("validation", "test")):
        files = sorted(map(str, tmp_path.glob(f"set/data/{split}-*")))
        cache = str(tmp_path / "cache")
        theirs = datasets.load_dataset(
            "parquet", data_files=files, split="train", cache_dir=cache
        ).cast_column("image", datasets.Image(decode=False))
        source = opened(tmp_path / "set", own)
        assert source.classes == NAMES and source.labels.tolist() == theirs["label"]
        records = source.read(range(len(theirs)))
        assert [one.image for one in records] == [image["bytes"] for image in theirs["image"]]


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
@pytest.mark.parametrize("by_dictionary", [True, False], ids=["dictionary", "plain"])
def test_pages_are_read_however_they_are_stored(version, compression, by_dictionary, tmp_path):
    rng = np.random.default_rng(0)
    images = [rng.bytes(rng.integers(1, 60)) for _ in range(20)] * 3
    images[7] = images[31] = None
    structs = [image and {"bytes": image, "path": None} for image in images]
    structs[40] = {"bytes": None, "path": "elsewhere.png"}
    for name, column, without in (("bytes", images, {7, 31}), ("structs", structs, {7, 31, 40})):
        path = tmp_path / f"{name}.parquet"
        pyarrow.parquet.write_table(
            pyarrow.table({"image": column}),
            path,
            row_group_size=25,
            compression=compression,
            data_page_version=version,
            use_dictionary=by_dictionary,
            dictionary_pagesize_limit=300,  # values beyond it are stored plain
            data_page_size=100,
            write_batch_size=4,
        )
        source = opened(path)
        rows = [i for i in rng.permutation(60).tolist() if i not in without]
        assert [one.image for one in source.read(rows)] == [images[i] for i in rows]
        for row in without:
            with pytest.raises(BadImage, match=f"row {row} cannot be read: the row has no image"):
                source[row]


def test_pages_that_are_not_read_are_refused_with_the_cure(tmp_path):
    for encoding in ("DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"):
        pyarrow.parquet.write_table(
            pyarrow.table({"image": [b"x", b"y"]}),
            tmp_path / "a.parquet",
            use_dictionary=False,
            column_encoding=encoding,
        )
        with pytest.raises(ConfigError, match=f"encoded by {encoding}, .*write_table"):
            opened(tmp_path / "a.parquet")


def test_a_damaged_page_is_an_error_that_names_the_row(tmp_path):
    write(tmp_path / "train.parquet", [0, 1, 2], group=1)
    source = opened(tmp_path)
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[4:80] = bytes(76)  # of the first row group, behind the format's mark
    (tmp_path / "train.parquet").write_bytes(content)
    with pytest.raises(BadImage, match="row 0 cannot be read: its page is damaged in the file"):
        source.read([2, 0])
    with pytest.raises(ConfigError, match="train.parquet cannot be read as a Parquet file"):
        opened(tmp_path)


def test_files_that_differ_in_their_classes_are_refused(tmp_path):
    write(tmp_path / "train-0.parquet", [0, 1])
    write(tmp_path / "train-1.parquet", [0, 1], NAMES[::-1])
    with pytest.raises(ConfigError, match="differ in the names of classes: triangle, square, disc"):
        opened(tmp_path)
    write(tmp_path / "train-1.parquet", [0, 3])
    with pytest.raises(ConfigError, match="'3' is out of range: the schema names 3 classes"):
        opened(tmp_path)


def test_rows_of_several_splits_and_nested_labels_are_refused(tmp_path):
    images = [{"bytes": png(1), "path": None}] * 4
    splits = ["Training", "Training", "Testing", "Testing"]
    table = pyarrow.table({"image": images, "label": [0, 1, 1, 0], "subset": splits})
    pyarrow.parquet.write_table(table, tmp_path / "all.parquet")
    with pytest.raises(
        ConfigError, match="by the column 'subset': Testing, Training. Write a file"
    ):
        opened(tmp_path / "all.parquet")
    pyarrow.parquet.write_table(table.slice(0, 2), tmp_path / "train.parquet")
    assert len(opened(tmp_path / "train.parquet")) == 2
    nested = pyarrow.table({"image": images[:1], "label": [{"moss": 1}]})
    pyarrow.parquet.write_table(nested, tmp_path / "nested.parquet")
    with pytest.raises(ConfigError, match="the labels are nested"):
        opened(tmp_path / "nested.parquet")


@pytest.mark.slow
def test_ten_to_the_five_rows_open_in_two_seconds_and_are_read_as_fast_as_of_a_tar(tmp_path):
    count = 100_000
    (tmp_path / "data").mkdir()
    of_datasets(count).to_parquet(tmp_path / "data/train.parquet")
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        for i in range(count):
            info = tarfile.TarInfo(f"{NAMES[i % 3]}/{i:06}.png")
            info.size = len(png(i % 250))
            archive.addfile(info, io.BytesIO(png(i % 250)))
    start = time.process_time()
    source = opened(tmp_path / "data")
    assert time.process_time() - start < 2  # 0.4 s on a quiet machine
    tar = sources.open_source(Data(name="tar", path=str(tmp_path / "x.tar"), holdout=0.0), "train")
    order = np.random.default_rng(0).permutation(count)[:20_000].reshape(-1, 100).tolist()

    def seconds(some):
        start = time.process_time()
        for indices in order:
            some.read(indices)
        return time.process_time() - start

    assert min(seconds(source) for _ in range(3)) < 1.5 * min(seconds(tar) for _ in range(3))
