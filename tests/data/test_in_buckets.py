"""Every kind of data set in a bucket is what it is on a disk."""

import concurrent.futures
import contextlib
import io
import json
import pickle
import tarfile
import time
import zipfile

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from etils import epath

from tests.waiting import PATIENCE, until
from vit_jax.base import buckets
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.record import read_records
from vit_jax.data.sources import fingerprint, ranges

from .test_tar import image, write_tar
from .tiny_tfds import write_tfds


def upload(folder, url):
    """Copies all files of a folder to a bucket."""
    for file in folder.rglob("*"):
        if file.is_file():
            target = epath.Path(url) / file.relative_to(folder).as_posix()
            target.write_bytes(file.read_bytes())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two class folders of six images each, and hidden files."""
    folder = tmp_path_factory.mktemp("folder")
    for i in range(12):
        file = folder / ("cat", "dog")[i % 2] / f"{i}.png"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(image(i))
    for hidden in (".git/x.jpg", "cat/.x.jpg"):
        (folder / hidden).parent.mkdir(exist_ok=True)
        (folder / hidden).write_bytes(b"")
    return folder


@pytest.fixture(scope="module")
def small_set(folder, tmp_path_factory):
    """`folder`, prepared as three files."""
    out = tmp_path_factory.mktemp("prepared") / "set"
    prepare(str(folder), str(out), num_shards=3, holdout=0.0)
    return out


def records(source, *, root=""):
    """(image, label, name) of all, as tuples; `root` is removed from names."""
    found = read_records(source, range(len(source)))
    assert [one.name for one in found] == [source[i].name for i in range(len(source))]
    return [(one.image, one.label, one.name.replace(str(root), "")) for one in found]


def same(local, remote, *, path, url):
    """Whether two sources have the same records, classes and fingerprint."""
    assert records(local, root=path) == records(remote, root=url)
    assert local.classes == remote.classes
    np.testing.assert_array_equal(local.labels, remote.labels)
    again = pickle.loads(pickle.dumps(remote))
    assert records(again)[-1] == records(remote)[-1]


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_a_prepared_set_in_a_bucket_is_that_on_a_disk(request, small_set, where):
    url = request.getfixturevalue(where) + "/set"
    upload(small_set, url)
    for split in ("train", "train[2:7]"):
        local, remote = (
            sources.open_source(Data(name="prepared", path=str(path)), split)
            for path in (small_set, url)
        )
        same(local, remote, path=small_set, url=url)
        assert local.fingerprint() == remote.fingerprint()


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_class_folders_in_a_bucket_are_those_on_a_disk_by_one_listing(request, folder, where):
    url = request.getfixturevalue(where) + "/raw"
    upload(folder, url)
    faults = request.getfixturevalue("faults" if where == "bucket" else "s3_faults")
    faults.forget_requests()
    remote = sources.open_source(Data(name="folder", path=url), "train")
    listings = [path for _, path in faults.requests() if "prefix=raw%2F" in path]
    assert [path for path in listings if "cat" in path] == []
    local = sources.open_source(Data(name="folder", path=str(folder)), "train")
    same(local, remote, path=folder, url=url)


def test_lists_in_a_bucket_name_images_beside_them_and_elsewhere(bucket, s3_bucket, tmp_path):
    rows = [("a/1.png", "cat"), ("./a//2.png", "dog"), ("b/../a/3.png", "cat")]
    for i in (1, 2, 3):
        (epath.Path(bucket) / "set" / "a" / f"{i}.png").write_bytes(image(i))
    (epath.Path(s3_bucket) / "4.png").write_bytes(image(4))
    rows.append((f"{s3_bucket}/4.png", "dog"))
    csv = epath.Path(bucket) / "set" / "list.csv"
    csv.write_text("path,label\n" + "".join(f"{path},{label}\n" for path, label in rows))
    lines = epath.Path(bucket) / "set" / "list.jsonl"
    lines.write_text("\n".join(json.dumps({"path": p, "label": label}) for p, label in rows))
    for path in (csv, lines):
        source = sources.open_source(Data(name="folder", path=str(path), holdout=0.0), "train")
        assert [image for image, _, _ in records(source)] == [image(i) for i in (1, 2, 3, 4)]
        assert source.labels.tolist() == [0, 1, 0, 1]
    (epath.Path(bucket) / "set" / "a" / "2.png").unlink()
    with pytest.raises(sources.BadImage, match="there is no such file"):
        source.read([0, 1])


def test_folders_in_a_bucket_are_understood_as_those_on_a_disk(bucket, tmp_path):
    names = [
        f"{s}/{c}/{i}.png" for s in ("Training", "valid") for c in ("cat", "dog") for i in "12"
    ]
    names += ["Training/cat/.thumbnails/1.png", "__MACOSX/1.png", "Training/cat/.1.png"]
    for i, name in enumerate(names):
        (tmp_path / "set" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "set" / name).write_bytes(image(i))
    upload(tmp_path / "set", f"{bucket}/set")
    for split in ("train", "test"):
        local, remote = (
            sources.open_source(Data(name="folder", path=str(path), holdout=0.0), split)
            for path in (tmp_path / "set", f"{bucket}/set")
        )
        assert len(local) == 4 and remote.paths == local.paths
        assert remote.classes == local.classes == ("cat", "dog")
    rows = "".join(f"{name},x\n" for name in names[:8])
    (epath.Path(bucket) / "set/metadata.csv").write_text("file_name,label\n" + rows)
    listed = Data(name="folder", path=f"{bucket}/set", holdout=0.0)
    source = sources.open_source(listed, "train")
    assert source.classes == ("x",) and len(source) == 4 and source.identity(0)


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
@pytest.mark.parametrize("file_format", ["array_record", "tfrecord"])
def test_what_tfds_prepared_is_read_from_a_bucket(
    request, tmp_path, monkeypatch, where, file_format
):
    import tensorflow_datasets as tfds

    url = request.getfixturevalue(where) + "/tfds"
    features = {"image": tfds.features.Image(), "label": tfds.features.ClassLabel(num_classes=3)}
    examples = [{"label": [i % 3]} for i in range(10)]
    write_tfds(tmp_path / "toy/1.0.0", features, examples, file_format=file_format)
    upload(tmp_path, url)
    local = sources.open_source(Data(name="toy", path=str(tmp_path)), "train")
    monkeypatch.setenv("TFDS_DATA_DIR", url)
    remote = sources.open_source(Data(name="toy"), "train")
    same(local, remote, path=tmp_path, url=url)
    assert [record.label for record in remote.read([7, 3, 8])] == [1, 0, 2]
    with pytest.raises(ConfigError, match="'nothing' is not prepared in .*prepared are: toy"):
        sources.open_source(Data(name="nothing"), "train")


def tars(folder, numbers):
    for number in numbers:
        members = {}
        for i in range(5):
            members |= {f"{i}.png": image(10 * number + i), f"{i}.cls": str(i % 3).encode()}
        write_tar(folder / f"x-train-{number:04}.tar", members)


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_tar_files_in_a_bucket_are_those_on_a_disk(request, tmp_path, where):
    url = request.getfixturevalue(where) + "/tars"
    tars(tmp_path, range(3))
    upload(tmp_path, url)
    for pattern in ("", "/x-train-*.tar", "/x-train-{0000..0002}.tar"):
        local, remote = (
            sources.open_source(Data(name="tar", path=f"{path}{pattern}", holdout=0.0), "train")
            for path in (tmp_path, url)
        )
        same(local, remote, path=tmp_path, url=url)
        assert local.fingerprint() == remote.fingerprint()


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_parquet_and_zip_files_in_a_bucket_are_those_on_a_disk(request, tmp_path, where):
    url = request.getfixturevalue(where) + "/set"
    images = [{"bytes": image(i), "path": None} for i in range(12)]
    for i, compression in enumerate(("none", "snappy")):
        table = pyarrow.table({"image": images[6 * i :][:6], "label": list("abcabc")})
        path = tmp_path / f"parquet/data/train-0000{i}-of-00002.parquet"
        path.parent.mkdir(parents=True, exist_ok=True)
        pyarrow.parquet.write_table(table, path, compression=compression, row_group_size=4)
    for method in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        with zipfile.ZipFile(tmp_path / f"{method}.zip", "w", method) as archive:
            for i in range(6):
                archive.writestr(f"{'ab'[i % 2]}/{i}.png", image(i))
    upload(tmp_path, url)
    for name in ("parquet", f"{zipfile.ZIP_STORED}.zip", f"{zipfile.ZIP_DEFLATED}.zip"):
        local, remote = (
            sources.open_source(Data(name="folder", path=f"{root}/{name}", holdout=0.0), "train")
            for root in (tmp_path, url)
        )
        same(local, remote, path=tmp_path, url=url)
        assert local.fingerprint() == remote.fingerprint()


def test_a_second_start_reads_the_index_and_no_parquet_file(bucket, faults):
    file = io.BytesIO()
    images = [{"bytes": image(i), "path": None} for i in range(6)]
    pyarrow.parquet.write_table(pyarrow.table({"image": images, "label": list("abcabc")}), file)
    (epath.Path(bucket) / "train.parquet").write_bytes(file.getvalue())

    def opened():
        faults.forget_requests()
        source = sources.open_source(Data(name="folder", path=bucket, holdout=0.0), "train")
        paths = [path for _, path in faults.requests()]
        return source, sum("train.parquet?" in path and "media" in path for path in paths)

    first, reads = opened()
    second, no_reads = opened()
    assert reads and not no_reads
    assert records(first) == records(second)


def opened_tars(url):
    return sources.open_source(Data(name="tar", path=url), "train")


def reads_of_tars(faults):
    return [path for method, path in faults.requests() if ".tar?" in path and "media" in path]


def test_a_second_start_reads_the_index_and_no_tar(bucket, faults, tmp_path):
    tars(tmp_path, range(4))
    upload(tmp_path, bucket)
    faults.forget_requests()
    first = records(opened_tars(bucket))
    assert len(reads_of_tars(faults)) > 4
    faults.forget_requests()
    source = opened_tars(bucket)
    assert not reads_of_tars(faults)
    assert records(source) == first


def test_a_second_start_reads_no_tables_of_a_prepared_set(
    bucket, faults, small_set, tmp_path, monkeypatch
):
    upload(small_set, bucket)

    def reads():
        faults.forget_requests()
        source = sources.open_source(Data(name="prepared", path=bucket), "train")
        assert source[0] and source[len(source) - 1]
        paths = [path for _, path in faults.requests() if "media" in path]
        return [
            sum(part in path for path in paths) for part in (".array_record?", "vit_jax.index?")
        ]

    assert reads()[0] > 2
    assert reads() == [2, 0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    assert reads() == [2, 1]


@pytest.mark.slow
def test_ten_thousand_tars_are_opened_by_a_listing(bucket, faults):
    file, count = io.BytesIO(), 10_000
    with tarfile.open(fileobj=file, mode="w") as tar:
        info = tarfile.TarInfo("a/1.png")
        info.size = len(image(1))
        tar.addfile(info, io.BytesIO(image(1)))
    content = file.getvalue()
    client = buckets.client("gs")
    for first in range(0, count, 1000):
        numbers = range(first, first + 1000)
        client.pipe({f"{bucket}/x-train-{number:05}.tar": content for number in numbers})
    assert len(opened_tars(bucket)) == count
    faults.forget_requests()
    start = time.process_time()
    source = opened_tars(bucket)
    assert time.process_time() - start < 5  # 0.5 s on a quiet machine
    listings = [path for _, path in faults.requests()]
    assert len(listings) <= count // 1000 + 5 and not reads_of_tars(faults)
    assert [one.image for one in source.read([0, count - 1])] == [image(1)] * 2


def test_a_changed_tar_alone_is_indexed_again(bucket, faults, tmp_path, caplog):
    tars(tmp_path, range(4))
    upload(tmp_path, bucket)
    before = records(opened_tars(bucket))
    write_tar(tmp_path / "x-train-0002.tar", {"9.png": image(99), "9.cls": b"0"})
    upload(tmp_path, bucket)
    faults.forget_requests()
    with caplog.at_level("INFO", logger="absl"):
        after = records(opened_tars(bucket))
    assert "finding the records of 4 of 4 files (4 have changed)" in caplog.text
    assert (
        after == before[:10] + [(image(99), 0, f"{bucket}/x-train-0002.tar, 9.png")] + before[15:]
    )


def test_where_the_index_cannot_be_written_it_is_kept_on_this_machine(
    bucket, faults, tmp_path, monkeypatch, caplog
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tars(tmp_path, range(2))
    upload(tmp_path, bucket)
    faults.inject("status", status=403, methods=("POST", "PUT"))
    first = records(opened_tars(bucket))
    assert "vit_jax.index cannot be written" in caplog.text
    faults.forget_requests()
    source = opened_tars(bucket)
    assert not reads_of_tars(faults) and records(source) == first


def test_a_damaged_index_is_made_again(bucket, tmp_path, caplog, monkeypatch):
    tars(tmp_path, range(2))
    upload(tmp_path, bucket)
    first = records(opened_tars(bucket))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    (epath.Path(bucket) / "vit_jax.index").write_bytes(b"no index")
    assert records(opened_tars(bucket)) == first
    assert "vit_jax.index is damaged" in caplog.text


def test_a_file_that_is_replaced_during_a_run_is_an_error_that_names_it(
    bucket, small_set, tmp_path
):
    tars(tmp_path, range(1))
    upload(tmp_path, f"{bucket}/tars")
    upload(small_set, f"{bucket}/set")
    prepared = sources.open_source(Data(name="prepared", path=f"{bucket}/set"), "train")
    tar = opened_tars(f"{bucket}/tars")
    for source, name in (
        (prepared, "train-00000-of-00003.array_record"),
        (tar, "x-train-0000.tar"),
    ):
        assert source[0]
        upload(tmp_path, f"{bucket}/tars")
        upload(small_set, f"{bucket}/set")
        with pytest.raises(sources.DataError, match=f"{name} was replaced while it was being read"):
            source[1]


def test_faults_of_a_bucket_are_ridden_out_and_what_lasts_ends_with_a_sentence(
    bucket, faults, small_set, monkeypatch
):
    upload(small_set, f"{bucket}/set")
    source = sources.open_source(Data(name="prepared", path=f"{bucket}/set"), "train")
    expected = records(source)
    for fault in (
        {"kind": "status", "status": 429},
        {"kind": "status", "status": 500},
        {"kind": "reset"},
        {"kind": "truncate"},
    ):
        faults.inject(**fault, every=7, times=3, methods=("GET",))
        assert records(source) == expected
        faults.clear()
    monkeypatch.setattr(ranges, "_STALLED", 0.2)
    faults.inject("stall", seconds=30, times=1, methods=("GET",))
    assert source[0].image == expected[0][0]
    faults.clear()
    faults.inject("status", status=403, methods=("GET",))
    with pytest.raises(sources.DataError, match="array_record cannot be read: PERMISSION_DENIED"):
        source[0]
    faults.clear()
    faults.inject("status", status=503, methods=("GET",))
    monkeypatch.setitem(ranges._RETRIES, "max_retries", 2)
    ranges._store.cache_clear()
    with pytest.raises(sources.DataError, match="array_record cannot be read: .* retry attempts"):
        source[0]
    ranges._store.cache_clear()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda content: content[: len(content) // 2], "has 65536 bytes, there should be 131072"),
        (lambda content: content + bytes(65536), "has 196608 bytes, there should be 131072"),
        (lambda content: content[:-65536] + bytes(65536), "is damaged: the chunk at byte"),
        (lambda content: None, "is missing"),
    ],
)
def test_a_shard_that_is_not_whole_is_named(bucket, small_set, change, message):
    upload(small_set, bucket)
    file = epath.Path(bucket) / "train-00000-of-00003.array_record"
    content = change(file.read_bytes())
    file.unlink() if content is None else file.write_bytes(content)
    source = sources.open_source(Data(name="prepared", path=bucket), "train")
    with pytest.raises(sources.DataError, match=f"{file} {message}"):
        source[0]


def test_hundreds_of_records_are_requested_at_once(bucket, faults, small_set):
    upload(small_set, bucket)
    source = sources.open_source(Data(name="prepared", path=bucket), "train")
    expected = records(source) * 20
    faults.forget_requests()
    faults.inject("stall", seconds=PATIENCE, methods=("GET",))
    with concurrent.futures.ThreadPoolExecutor() as threads, contextlib.ExitStack() as at_last:
        at_last.callback(faults.clear)
        reading = threads.submit(source.read, list(range(len(source))) * 20)
        until(lambda: len(faults.requests()) >= 200)  # none of which is answered yet
        faults.clear()
        found = reading.result()
    assert [record.image for record in found] == [image for image, _, _ in expected]


def test_an_empty_prefix_and_a_prefix_that_is_an_object_are_named(bucket):
    with pytest.raises(ConfigError, match=f"{bucket}/none' does not exist"):
        sources.open_source(Data(name="folder", path=f"{bucket}/none"), "train")
    with pytest.raises(ConfigError, match=f"{bucket}/none has no dataset.json"):
        sources.open_source(Data(name="prepared", path=f"{bucket}/none"), "train")
    with pytest.raises(ConfigError, match=f"there is no tar file {bucket}/none"):
        sources.open_source(Data(name="tar", path=f"{bucket}/none"), "train")
    with pytest.raises(ConfigError, match="is not prepared in gs://.*/none"):
        sources.open_source(Data(name="cifar10", path=f"{bucket}/none"), "train")
    (epath.Path(bucket) / "object").write_bytes(b"x")
    with pytest.raises(ConfigError):
        sources.open_source(Data(name="folder", path=f"{bucket}/object"), "train")


def opened_folder(url, *, cache="", **fields):
    return sources.open_source(
        Data(path=url, cache=str(cache), **{"name": "folder"} | fields), "train"
    )


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_a_picture_that_is_rewritten_is_another_data_set_and_leaves_the_cache(
    request, folder, tmp_path, where
):
    url = request.getfixturevalue(where) + "/raw"
    upload(folder, url)
    before = opened_folder(url, cache=tmp_path)
    first, mark = records(before), before.fingerprint()
    number = 3
    name, content = first[number][2], first[number][0]
    new = content[:-1] + bytes([content[-1] ^ 1])  # of the same size
    epath.Path(f"{url}{name.removeprefix(url)}").write_bytes(new)
    after = opened_folder(url, cache=tmp_path)
    assert after.fingerprint() != mark and not fingerprint.same(mark, after.fingerprint())
    assert fingerprint.same(mark.partition("-")[0], after.fingerprint())  # an earlier version's
    assert records(after)[number][0] == new
    faults = request.getfixturevalue("faults" if where == "bucket" else "s3_faults")
    faults.forget_requests()
    assert records(after) == first[:number] + [(new, *first[number][1:])] + first[number + 1 :]
    assert not [path for _, path in faults.requests() if ".png" in path]  # all from the cache
    epath.Path(f"{url}{name.removeprefix(url)}").write_bytes(content)
    assert opened_folder(url).fingerprint() == mark


def test_a_copy_elsewhere_in_buckets_has_the_same_fingerprint(bucket, folder):
    upload(folder, f"{bucket}/one")
    upload(folder, f"{bucket}/other/place")
    one, other = opened_folder(f"{bucket}/one"), opened_folder(f"{bucket}/other/place")
    assert one.fingerprint() == other.fingerprint()


def test_a_mask_that_is_rewritten_is_another_data_set_and_leaves_the_cache(bucket, tmp_path):
    for i in range(4):
        for kind in ("images", "masks"):
            (epath.Path(bucket) / kind / f"{i}.png").write_bytes(image(i))
    (epath.Path(bucket) / "classes.csv").write_text("name,value\na,0\nb,1\n")
    fields = {"name": "masks", "holdout": 0.0, "cache": tmp_path}
    before = opened_folder(bucket, **fields)
    first = records(before)
    (epath.Path(bucket) / "masks" / "2.png").write_bytes(image(9))
    after = opened_folder(bucket, **fields)
    assert after.fingerprint() != before.fingerprint()
    assert records(after) == first[:2] + [(image(2), image(9), first[2][2])] + first[3:]


def test_a_listing_of_several_pages_is_whole(bucket, s3_bucket, monkeypatch):
    """With pages of two objects."""
    for url, method, most in ((bucket, "call", "maxResults"), (s3_bucket, "call_s3", "MaxKeys")):
        for i in range(5):
            (epath.Path(url) / "set" / f"{i}.png").write_bytes(image(i))
        client = buckets.client(url[:2])
        ask = getattr(client, method)
        monkeypatch.setattr(
            client, method, lambda *a, ask=ask, most=most, **k: ask(*a, **{most: 2}, **k)
        )
        assert [name for name, _ in ranges.list_objects(f"{url}/set")] == [
            f"{i}.png" for i in range(5)
        ]
