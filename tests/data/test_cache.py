"""`data.cache`: records on a local disk, bounded, verified, shared."""

import dataclasses
import pickle
import subprocess
import sys

import cv2
import numpy as np
import pytest

from tests.data.test_loader import assert_same, digits, make_config, steps
from tests.data.test_reading import InBlocks, Late
from vit_jax.base.errors import ConfigError
from vit_jax.data.cache import CachedSource, cached, pack, unpack
from vit_jax.data.options import Data
from vit_jax.data.record import Record
from vit_jax.data.sources import open_data_set, open_eval, open_train

GIB = 2**30


class Named(Late):
    """Images of noise, which can be recognised and are counted."""

    def __init__(self, size=60, seconds=0.0):
        super().__init__(digits(), seconds)
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        super().__getitem__(index)
        content = np.random.default_rng(index).bytes(5000 + index)
        return Record(content, index % 10, f"number {index}")

    def fingerprint(self):
        return f"noise {self.size}"

    def __reduce__(self):
        return Named, (self.size,)


def read_all(source):
    return [source[index] for index in range(len(source))]


def data_files(folder):
    return sorted(folder.glob("*/data-*"))


def test_what_was_read_once_comes_from_the_disk_then_and_in_other_processes(tmp_path):
    source = Named()
    first = CachedSource(source, tmp_path, GIB)
    expected = read_all(first)
    assert source.reads == 60 and expected == [Named()[i] for i in range(60)]
    assert read_all(first) == expected and source.reads == 60
    other = pickle.loads(pickle.dumps(first))
    assert read_all(other) == expected and other._source.reads == 0
    (file,) = data_files(tmp_path)
    assert file.stat().st_size == sum(len(pack(one)) for one in expected)


@pytest.mark.parametrize(
    "record",
    [
        Record(b"bytes", None, "no label"),
        Record(b"bytes", (), "no labels"),
        Record(b"bytes", (3, 5), "labels"),
        Record(np.arange(24, dtype=np.uint16).reshape(2, 3, 4), np.int64(7), "an array"),
        Record(b"bytes", np.linspace(0, 1, 5, dtype=np.float32), "probabilities"),
    ],
    ids=lambda record: record.name,
)
def test_every_kind_of_record_is_kept(record):
    assert unpack(pack(record))[1] is None
    found, identity = unpack(pack(record, ("a.png", 2**64 - 1, None)))
    assert identity == ("a.png", 2**64 - 1, None)
    for name in ("image", "label", "name"):
        one, other = getattr(found, name), getattr(record, name)
        assert np.array_equal(one, other) and np.asarray(one).dtype == np.asarray(other).dtype


def test_data_sets_do_not_mix(tmp_path):
    one, other = CachedSource(Named(60), tmp_path, GIB), CachedSource(Named(61), tmp_path, GIB)
    read_all(one)
    assert read_all(other)[:60] == read_all(one) and other._source.reads == 61


def damage(path, change):
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


DAMAGES = {
    "a bit of a record": ("data-0", lambda content: content.__setitem__(100, content[100] ^ 1)),
    "no data": ("data-0", lambda content: content.clear()),
    "half of the data": ("data-0", lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "an entry": ("index", lambda content: content.__setitem__(9, content[9] ^ 1)),
    "an entry of another": ("index", lambda content: content.__setitem__(slice(24), content[24:48])),
    "half of the index": ("index", lambda content: content.__delitem__(slice(len(content) // 2, None))),
    "noise": ("index", lambda content: content.__setitem__(slice(None), np.random.bytes(60 * 24))),
}  # fmt: skip


@pytest.mark.parametrize("kind", DAMAGES)
def test_what_is_damaged_is_read_again_and_mended(tmp_path, kind):
    expected = read_all(CachedSource(Named(), tmp_path, GIB))
    name, change = DAMAGES[kind]
    damage(next(tmp_path.glob(f"*/{name}")), change)
    again = CachedSource(Named(), tmp_path, GIB)
    assert read_all(again) == expected and again._source.reads > 0
    reads = again._source.reads
    assert read_all(again) == expected and again._source.reads == reads


def test_data_files_that_were_removed_are_read_again(tmp_path, caplog):
    expected = read_all(CachedSource(Named(), tmp_path, GIB))
    (file,) = data_files(tmp_path)
    file.unlink()
    again = CachedSource(Named(), tmp_path, GIB)
    assert read_all(again) == expected and again._source.reads == 60
    assert sum("is damaged" in message for message in caplog.messages) == 1


def test_it_is_bounded_over_all_data_sets_and_names_the_bound(tmp_path, caplog):
    one, other = (
        CachedSource(Named(60), tmp_path, 150_000),
        CachedSource(Named(50), tmp_path, 200_000),
    )
    for source in (one, other):
        first = read_all(source)
        assert read_all(source) == first
    assert 60 < one._source.reads < 120 and 50 < other._source.reads < 100
    assert 180_000 < sum(file.stat().st_size for file in data_files(tmp_path)) <= 200_000
    assert sum("config.data.cache_gib" in message for message in caplog.messages) == 2


# What other processes run, without JAX, which takes long to import.
OTHERS = """
import pathlib, random, resource, sys
from vit_jax.data.cache import CachedSource
from vit_jax.data.record import Record

class Source:
    classes, multi_label, labels, reads = ("a",), False, None, 0
    def fingerprint(self):
        return "others"
    def __len__(self):
        return 200
    def __getitem__(self, index):
        self.reads += 1
        return Record(random.Random(index).randbytes(5000 + index), 0, f"number {index}")

def source():
    return CachedSource(Source(), pathlib.Path(sys.argv[1]), 2**30)

def check(cache):
    for index in random.sample(range(200), 200):
        assert cache[index] == Source()[index]
"""
FULL = """
resource.setrlimit(resource.RLIMIT_FSIZE, (500_000, 500_000))
cache = source()
check(cache), check(cache)
assert 200 < cache._source.reads < 400
"""
SHARED = """
for _ in range(10):
    cache = source()
    check(cache), check(cache)
"""
LAST = """
cache = source()
check(cache)
assert cache._source.reads == 0
"""


def python(code, folder):
    return subprocess.Popen(
        [sys.executable, "-c", OTHERS + code, folder], stderr=subprocess.PIPE, text=True
    )


def finish(process):
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    return errors


def test_a_full_disk_is_reported_once_and_the_run_goes_on(tmp_path):
    errors = finish(python(FULL, tmp_path))
    assert errors.count("cannot be written to (File too large)") == 1


def test_processes_share_it(tmp_path):
    for process in [python(SHARED, tmp_path) for _ in range(3)]:
        finish(process)
    finish(python(LAST, tmp_path))
    assert 1 <= len(data_files(tmp_path)) <= 3
    assert sum(file.stat().st_size for file in data_files(tmp_path)) < 3 * 200 * 5300


def test_what_is_missing_is_read_with_one_call(tmp_path):
    class Blocks(Named):
        def read(self, indices):
            self.calls = [*getattr(self, "calls", []), indices]
            return [self[index] for index in indices]

    source = Blocks()
    cache = CachedSource(source, tmp_path, GIB)
    cache[3], cache[5]
    assert cache.read([2, 3, 4, 5, 6]) == [Named()[i] for i in (2, 3, 4, 5, 6)]
    assert cache.read([2, 3]) == [Named()[2], Named()[3]] and source.calls == [[2, 4, 6]]
    assert not hasattr(CachedSource(Named(), tmp_path, GIB), "read")


@pytest.mark.parametrize("make", [Late, InBlocks])
def test_batches_have_the_same_bits(tmp_path, make):
    class Source(make):
        def fingerprint(self):
            return digits().fingerprint()

    expected = steps(digits(), make_config(), 0, 5)
    for read_ahead in (-1, 0, 64):
        for _ in range(2):
            source = CachedSource(Source(digits(), 0.001), tmp_path / str(read_ahead), GIB)
            assert_same(steps(source, make_config(read_ahead=read_ahead), 0, 5), expected)


def write_images(folder):
    for i in range(12):
        path = folder / "ab"[i % 2] / f"{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        assert cv2.imwrite(str(path), np.full((9, 9, 3), 20 * i, np.uint8))


@pytest.fixture
def config(tmp_path):
    write_images(tmp_path / "images")
    return Data(
        name="folder", path=str(tmp_path / "images"), cache=str(tmp_path / "cache"), holdout=0.25
    )


def test_any_data_set_is_cached_and_a_mixture_set_by_set(config, tmp_path):
    train, test = open_train(config), open_eval(config)
    assert len(train) + len(test) == 12 and train.labels is not None
    read_all(train), read_all(test)
    assert len(data_files(tmp_path / "cache")) == 2
    mixture = ((config.path, 1), (config.path, 3))
    mixed = open_train(dataclasses.replace(config, name="mixture", mixture=mixture))
    read_all(mixed)
    assert sum(file.stat().st_size for file in data_files(tmp_path / "cache")) < 12 * 500
    for file in (tmp_path / "images").rglob("*.png"):
        file.unlink()
    assert {record.label for record in read_all(mixed)} == {0, 1}


def test_a_folder_that_cannot_be_used_is_refused(config, tmp_path):
    with pytest.raises(ConfigError, match="config.data.cache = 'gs://a/b' must be .* local disk"):
        open_data_set(dataclasses.replace(config, cache="gs://a/b")).open("train")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="config.data.cache=.*file is a file"):
        open_train(dataclasses.replace(config, cache=str(tmp_path / "file")))


def test_without_a_folder_there_is_none():
    assert cached(digits(), Data()) is digits()
