"""The index of files of records: made once, shared by the processes of a machine, compared with the files."""

import errno
import multiprocessing
import os
import pathlib
import resource
import time
import zlib

import msgpack
import numpy as np
import pytest

from vit_jax.base import limits
from vit_jax.base.errors import UserError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation.index import index
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.record import BadImage, DataError
from vit_jax.data.sources import arrayrecord, stored_index, tar_index, tfrecord
from vit_jax.data.sources.columns import FileColumns, Index, open_index, smallest

from .test_tar import image, write_tar

_scan = tar_index.KIND.scan  # tests replace the kind


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """The folder of this machine's copies. However small files are, their index is stored."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(stored_index, "_SMALL", 0)
    return tmp_path / "cache" / "vit_jax" / "indices"


@pytest.fixture
def tars(tmp_path):
    """A folder of three tar files with five images each."""
    for number in range(3):
        write_number(tmp_path / "tars", number)
    return tmp_path / "tars"


def write_number(folder, number, images=5):
    names = [f"{'abc'[i % 3]}/{number}-{i}.png" for i in range(images)]
    write_tar(folder / f"x-{number}.tar", {name: image(i) for i, name in enumerate(names)})


def opened(folder):
    source = sources.open_source(Data(name="tar", path=str(folder), holdout=0.0), "train")
    return [(one.image, one.label, one.name) for one in source.read(range(len(source)))]


@pytest.fixture
def scans(monkeypatch):
    """The tar files that were scanned."""
    names = []

    def scan(file):
        names.append(os.path.basename(file.path))
        return _scan(file)

    kind = stored_index.Kind(tar_index.KIND.name, scan, tar_index.KIND.earlier)
    monkeypatch.setattr(tar_index, "KIND", kind)
    return names


def test_tars_on_a_disk_are_scanned_once(tars, scans):
    first = opened(tars)
    assert sorted(scans) == ["x-0.tar", "x-1.tar", "x-2.tar"]
    assert opened(tars) == first and len(scans) == 3
    assert (tars / "vit_jax.index").exists() and not list(tars.glob(".*"))


def test_files_of_several_folders_and_relative_paths_have_an_index(tars, scans, monkeypatch):
    for number in range(2):
        write_number(tars / f"part-{number}", number)
        os.replace(tars / f"part-{number}/x-{number}.tar", tars / f"part-{number}/x.tar")
    for _ in range(2):  # scanned; from the index
        names = [name for *_, name in opened(tars / "part-{0..1}/x.tar")]
        assert names[::5] == [f"{tars}/part-{i}/x.tar, a/{i}-0.png" for i in range(2)]
    assert scans == ["x.tar", "x.tar"]
    monkeypatch.chdir(tars)
    assert len(opened("x-0.tar")) == len(opened("x-0.tar")) == 5 and len(scans) == 3
    assert len(opened(tars / "x-0.tar")) == 5 and len(scans) == 3


def test_a_tar_that_grew_and_a_new_one_alone_are_scanned_again(tars, scans, caplog):
    before = opened(tars)
    scans.clear()
    write_number(tars, 1, images=7)
    write_number(tars, 3)
    with caplog.at_level("INFO", logger="absl"):
        after = opened(tars)
    assert sorted(scans) == ["x-1.tar", "x-3.tar"]
    assert "finding the records of 2 of 4 files (1 have changed)" in caplog.text
    assert len(after) == 22 and after[:5] == before[:5] and after[12:17] == before[10:]


def test_an_index_of_other_files_is_made_again_and_named(tars, tmp_path, scans, caplog):
    expected = opened(tars)
    other = tmp_path / "other"
    for number in (7, 8):
        write_number(other, number)
    opened(other)
    os.replace(other / "vit_jax.index", tars / "vit_jax.index")
    scans.clear()
    with caplog.at_level("INFO", logger="absl"):
        assert opened(tars) == expected
    assert len(scans) == 3 and "(vit_jax.index is of other files)" in caplog.text
    # Of the same names, but another time: copied from a folder that is like this one.
    os.utime(tars / "x-0.tar", ns=(1, 1))
    scans.clear()
    assert opened(tars) == expected and scans == ["x-0.tar"]


@pytest.mark.parametrize("kind", ["tar 2", "tar 3"])
def test_an_index_of_a_version_that_understood_labels_otherwise_is_made_again(tars, scans, kind):
    expected = opened(tars)
    content = (tars / "vit_jax.index").read_bytes()
    assert content.count(b"tar 4") == 1
    if kind == "tar 2":
        old = {"format": [1, kind], "files": {}}
        (tars / "vit_jax.index").write_bytes(zlib.compress(msgpack.packb(old), 1))
    else:
        current = open_index(tars / "vit_jax.index")
        current.kind = kind
        current.write(tars / "older.index")
        os.replace(tars / "older.index", tars / "vit_jax.index")
    scans.clear()
    assert opened(tars) == expected and len(scans) == 3
    assert open_index(tars / "vit_jax.index").kind == "tar 4"


@pytest.mark.parametrize("damage", [b"no index", None, "header", "short"])
def test_a_damaged_index_is_made_again(tars, scans, damage, caplog):
    expected = opened(tars)
    path = tars / "vit_jax.index"
    content = path.read_bytes()
    if damage == "header":
        damage = content[:60] + bytes([content[60] ^ 1]) + content[61:]
    elif damage == "short":
        damage = content[:-8]
    path.unlink()  # as `prepare` replaces it: what is mapped stays
    if damage is not None:
        path.write_bytes(damage)
        assert opened(tars) == expected
        assert "vit_jax.index is damaged" in caplog.text
    else:
        assert opened(tars) == expected
    assert len(scans) == 6


def test_a_copy_in_the_cache_is_verified_when_it_is_made(tars, cache, scans, monkeypatch, caplog):
    monkeypatch.setattr(stored_index.places, "is_remote", lambda folder: True)  # a mount
    expected = opened(tars)
    (copy,) = (path for path in cache.iterdir() if path.suffix != ".lock")
    assert open_index(copy, verify=True).files
    copy.unlink()
    assert opened(tars) == expected and len(scans) == 3  # of what lies beside the files
    copy.unlink()
    path = tars / "vit_jax.index"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    assert opened(tars) == expected and len(scans) == 6
    assert "vit_jax.index is damaged (its columns are damaged)" in caplog.text


@pytest.fixture
def prepared(tmp_path):
    """A prepared set of two files with three images each."""
    for i in range(6):
        (tmp_path / f"raw/{'ab'[i % 2]}").mkdir(parents=True, exist_ok=True)
        (tmp_path / f"raw/{'ab'[i % 2]}/{i}.png").write_bytes(image(i))
    prepare(str(tmp_path / "raw"), str(tmp_path / "set"), num_shards=2, holdout=0.0)
    return tmp_path / "set"


def test_a_prepared_set_on_a_mount_is_read_by_its_index(prepared, tmp_path, monkeypatch):
    def records():
        data = Data(name="prepared", path=str(tmp_path / "set"))
        source = sources.open_source(data, "train")
        return [(one.image, one.label, one.name) for one in source.read(range(len(source)))]

    on_disk = records()
    assert "index" not in index(str(tmp_path / "set"))
    monkeypatch.setattr(stored_index.places, "is_remote", lambda folder: True)
    arrayrecord._is_remote.cache_clear()
    assert records() == on_disk and (tmp_path / "set/vit_jax.index").exists()
    assert index(str(tmp_path / "set"))["records"] == 6
    file = tmp_path / "set/train-00001-of-00002.array_record"
    file.write_bytes(file.read_bytes() + bytes(1 << 16))
    with pytest.raises(DataError, match=f"{file} has 196608 bytes, there should be 131072"):
        records()
    arrayrecord._is_remote.cache_clear()


def test_where_nobody_may_write_the_index_is_kept_in_the_cache_and_that_is_logged_once(
    tars, scans, monkeypatch, caplog
):
    def refuse(*_):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(tars))

    # Tests may run as root, whom permissions do not stop.
    monkeypatch.setattr(stored_index.places, "upload", refuse)
    expected = opened(tars)
    assert opened(tars) == expected and len(scans) == 3
    assert caplog.text.count("vit_jax.index cannot be written (Read-only file system)") == 1
    with pytest.raises(UserError, match="vit_jax.index cannot be written: Read-only file system"):
        index(str(tars))


def make(folder, seconds, started):
    """What a process does: opens tars whose scan takes a while, and notes each."""
    stored_index._SMALL = 0

    def scan(file):
        with open(started, "a") as file_of_names:
            file_of_names.write(f"{os.path.basename(file.path)}\n")
        time.sleep(seconds)
        return _scan(file)

    tar_index.KIND = stored_index.Kind(tar_index.KIND.name, scan)
    assert len(opened(folder)) == 15


def test_of_several_processes_one_makes_the_index_and_the_others_wait(tars, tmp_path):
    started = tmp_path / "scanned"
    spawn = multiprocessing.get_context("spawn")
    makers = [spawn.Process(target=make, args=(tars, 0.5, started)) for _ in range(2)]
    for maker in makers:
        maker.start()
    for maker in makers:
        maker.join()
    assert [maker.exitcode for maker in makers] == [0, 0]
    assert sorted(started.read_text().split()) == ["x-0.tar", "x-1.tar", "x-2.tar"]


def test_columns_of_any_lengths_come_back_as_they_were(tmp_path):
    rng = np.random.default_rng(0)
    parts = {}
    for number in range(5):
        file = stored_index.places.File(f"/a/{number}", number, str(number))
        rows = int(rng.integers(0, 40))
        columns = {
            "first": smallest(rng.integers(0, 2**33 if number == 3 else 2**20, rows)),
            "code": rng.integers(0, 3, rows).astype("<u4"),
            "name": rng.integers(0, 256, 3 * rows).astype(np.uint8),
        }
        if number == 2:
            columns["more"] = np.arange(7)
        table = [(f"{number % 2}", i) for i in range(3)]
        parts[file] = FileColumns(columns, table, {"n": [number, "\udcff"]})
    Index.of("kind", parts).write(tmp_path / "index")
    found = open_index(tmp_path / "index", verify=True)
    for file, part in parts.items():
        number = found.number(file.path)
        assert found.has(file) and found.notes[number]["n"] == (part.note["n"][0], "\udcff")
        for name, column in part.columns.items():
            if name != "code":
                np.testing.assert_array_equal(found.column(name, number), column)
        codes = found.column("code", number)
        assert [found.table[c] for c in codes] == [part.table[c] for c in part.columns["code"]]
    assert found.count("more", 2) == 7 and found.count("more", 3) == 0
    merged = Index.of("kind", {file: found.part(found.number(file.path)) for file in parts})
    assert merged.table == found.table


def test_records_of_tfrecord_files_are_found_again(tmp_path):
    path, sizes = tmp_path / "x.tfrecord-00000-of-00001", [3, 0, 70_000, 1]
    contents = [bytes([i]) * size for i, size in enumerate(sizes)]
    framed = [len(c).to_bytes(8, "little") + bytes(4) + c + bytes(4) for c in contents]
    path.write_bytes(b"".join(framed))
    for _ in range(2):  # scanned; from the index
        records = tfrecord.TfRecords([(str(path), 1, 4)])
        assert records.read(range(3)) == contents[1:] and len(records) == 3
    earlier = tfrecord.KIND.earlier["tfrecord 1"](np.asarray(sizes, "<i8").tobytes())
    found = open_index(pathlib.Path(tmp_path / "vit_jax.index"))
    np.testing.assert_array_equal(earlier.columns["first"], found.column("first", 0))
    path.write_bytes(b"".join(framed)[:-1])
    with pytest.raises(DataError, match="record 3, at byte .* reaches beyond its"):
        tfrecord.TfRecords([(str(path), 0, 4)])


def test_the_command_says_what_it_stored(tars, command, tmp_path):
    code, told, _ = command("prepare", tars, "--index")
    assert code == 0 and f"15 records of 3 files: {tars}/vit_jax.index" in told
    code, told, _ = command("prepare", tars, f"--out={tmp_path}/set", "--index")
    assert code == 0 and "no index needed" in told
    code, _, errors = command("prepare", tars, "--index", "--shard=1/2")
    assert code == 2 and "--index is of the whole set" in errors
    (tmp_path / "photos/a").mkdir(parents=True)
    (tmp_path / "photos/a/1.png").write_bytes(image(1))
    code, _, errors = command("prepare", tmp_path / "photos", "--index")
    assert code == 2 and "has no files of records to index" in errors


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EIO])
def test_a_shortage_is_no_damage_and_asks_for_another_start(number):
    error = limits.as_user_error(OSError(number, os.strerror(number), "x.array_record"))
    assert error.exit_code == 42 and "x.array_record cannot be read: " in str(error)
    assert limits.is_shortage(OSError(number, "")) == (number != errno.EIO)
    assert limits.as_user_error(OSError(errno.ENOENT, "")) is None


def test_files_that_cannot_be_opened_for_want_of_descriptors_are_not_damaged(prepared):
    source = sources.open_source(Data(name="prepared", path=str(prepared)), "train")
    assert source[0].image  # the last file is not open
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)  # all below are taken
    os.close(lowest)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
    try:
        with pytest.raises(OSError, match="Too many open files") as raised:
            source[5]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    message = str(limits.as_user_error(raised.value))
    assert "train-00001-of-00002.array_record cannot be read: this process has all the" in message
    assert source[5].image


class FailingDisk:
    """ArrayRecord's reader of a file on a disk with bad sectors."""

    def num_records(self) -> int:
        return 3

    def read(self, rows: list[int]) -> list[bytes]:
        raise RuntimeError("pread() failed: Input/output error; reading x.array_record")


def test_a_record_that_the_disk_cannot_read_is_a_bad_image_and_not_called_damaged(
    prepared, monkeypatch
):
    source = sources.open_source(Data(name="prepared", path=str(prepared)), "train")
    monkeypatch.setattr(arrayrecord.OPEN, "get", lambda *_: FailingDisk())
    for read in (lambda: source[4], lambda: source.read([4])):
        with pytest.raises(BadImage, match="record 1 cannot be read: Input/output error"):
            read()
