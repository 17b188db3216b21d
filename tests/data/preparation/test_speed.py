"""How fast `prepare` is, as ratios of runs that take turns. `pytest -s --runslow` prints the figures."""

import concurrent.futures
import contextlib
import itertools
import os
import shutil
import statistics
import time

import pytest
from etils import epath

from vit_jax.data.preparation.check import examine
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.preparation.shards import sha256
from vit_jax.data.record import Record
from vit_jax.data.sources.prepared import pack

from ..test_in_buckets import upload

pytestmark = pytest.mark.slow
TURNS = 5


@pytest.fixture(scope="module")
def photos(shared_data, tmp_path_factory):
    """Two class folders of 400 photos in all."""
    folder = tmp_path_factory.mktemp("photos")
    files = sorted((shared_data / "imagenet_sample").rglob("*.JPEG"))
    assert len(files) == 200
    for i, file in itertools.product(range(2), files):
        (folder / f"class{i}").mkdir(exist_ok=True)
        shutil.copy(file, folder / f"class{i}" / file.name)
    return folder


def seconds(work) -> tuple[float, float]:
    """Seconds that `work` takes, by the clock and by the processor."""
    start, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - used


def taking_turns(ways: dict) -> dict[str, tuple[float, float]]:
    """Name of a way → the median seconds of it, by the clock and by the processor."""
    found = {name: [] for name in ways}
    for _ in range(TURNS):
        for name, work in ways.items():
            found[name].append(seconds(work))
    return {
        name: tuple(statistics.median(one) for one in zip(*times, strict=True))
        for name, times in found.items()
    }


def prepared(source, out):
    with contextlib.suppress(FileNotFoundError):
        epath.Path(out).rmtree()
    prepare(str(source), str(out), num_shards=4, holdout=0.1)


def test_preparing_costs_little_more_than_decoding_and_writing(photos, tmp_path):
    from array_record.python.array_record_module import ArrayRecordWriter

    files = sorted(photos.rglob("*.JPEG"))

    def alone():
        """Decodes all images, on all cores, and writes them, with their checksum."""
        images = [file.read_bytes() for file in files]
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda image: examine(image, "x.jpg"), images))
        writer = ArrayRecordWriter(str(tmp_path / "alone"), "group_size:1,uncompressed")
        for image in images:
            writer.write(pack(Record(image, 0, "x.jpg")))
        writer.close()
        sha256(tmp_path / "alone")

    times = taking_turns({"alone": alone, "prepare": lambda: prepared(photos, tmp_path / "out")})
    print(times, "ratio", *(times["alone"][i] / times["prepare"][i] for i in range(2)))
    assert times["alone"][1] / times["prepare"][1] > 0.9


def test_the_latency_of_a_bucket_is_hidden(photos, tmp_path, bucket, faults):
    upload(photos, f"{bucket}/raw")

    def in_bucket(milliseconds):
        faults.latency(milliseconds)
        prepared(f"{bucket}/raw", f"{bucket}/set")
        faults.latency(0)

    ways = {
        "local": lambda: prepared(photos, tmp_path / "out"),
        "bucket": lambda: in_bucket(0),
        "bucket at 50 ms": lambda: in_bucket(50),
    }
    times = taking_turns(ways)
    print(times, "ratio", times["bucket"][0] / times["bucket at 50 ms"][0])
    assert times["bucket"][0] / times["bucket at 50 ms"][0] > 0.8
