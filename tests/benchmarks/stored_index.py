"""What opening a large data set takes from a stored index: processor time and memory of a fresh process, from the
config to the first record, on generated indexes of files that have nothing in them.

    python -m tests.benchmarks.stored_index --out=FOLDER [--records=14200000] [--kinds=prepared,array_record,…]

`prepared` and `tar` are opened as training does: labels of all examples, the fingerprint, a record's place. Of
`array_record` and `tfrecord` a record's place is looked up. FOLDER gets up to 45 bytes for each record.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import time

import numpy as np

from vit_jax.base import places
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.sources import arrayrecord, prepared, stored_index, tar_index, tfrecord
from vit_jax.data.sources.columns import Index

PER_FILE = {"prepared": 4096, "array_record": 4096, "tfrecord": 4096, "tar": 10_000}
CLASSES, BYTES, NAME = 10_000, 92_000, 20


class Repeated:
    """A column that has the same values in each file, made when it is written."""

    def __init__(self, values, files: int):
        self._values, self._files, self.dtype = values, files, values.dtype

    def __len__(self):
        return len(self._values) * self._files

    def __getitem__(self, part: slice):
        return self._values[np.arange(*part.indices(len(self))) % len(self._values)]


def make_files(folder: pathlib.Path, kind: str, count: int) -> list[str]:
    """Files of 64 MiB that take no room on the disk; their paths."""
    folder.mkdir(parents=True)
    ending = {"tar": "tar", "tfrecord": "tfrecord-00"}.get(kind, kind)
    paths = [str(folder / f"images-{number:06}-of-{count:06}.{ending}") for number in range(count)]
    for path in paths:
        with open(path, "wb") as file:
            file.truncate(1 << 26)
    return paths


def columns(kind: str, size: int) -> dict[str, np.ndarray]:
    """Those of one file of `size` records."""
    first = np.arange(size + 1, dtype="<u4") * np.uint32(BYTES)
    if kind == "array_record":
        return {"first": first, "record": first[:0]}
    if kind == "tfrecord":
        return {"first": first}
    rng = np.random.default_rng(0)
    return {
        "first": first[:-1],
        "size": np.full(size, BYTES, "<u4"),
        "name": rng.integers(97, 123, size * NAME, np.uint8),
        "name_end": np.arange(1, size + 1, dtype="<u4") * np.uint32(NAME),
        "hash": rng.integers(0, 2**64, size, "<u8", endpoint=False),
        "code": rng.integers(0, CLASSES, size).astype("<u4"),
    }


def make(folder: pathlib.Path, kind: str, records: int) -> None:
    """A data set of a kind, and its index."""
    size = PER_FILE[kind]
    count = -(-records // size)
    paths = make_files(folder, kind, count)
    if kind == "prepared":
        shards = [
            {"file": os.path.basename(p), "examples": size, "bytes": 1 << 26, "sha256": p}
            for p in paths
        ]
        np.save(folder / "labels.npy", np.resize(np.arange(CLASSES, dtype=np.int32), count * size))
        split = {"examples": count * size, "shards": shards, "labels": {"file": "labels.npy"}}
        description = {"format": prepared.FORMAT, "classes": list(map(str, range(CLASSES)))}
        description |= {"multi_label": False, "aliases": {}, "splits": {"train": split}}
        (folder / prepared.DESCRIPTION).write_text(json.dumps(description))
        return
    described = {os.path.basename(path): places.describe_file(path) for path in paths}
    known = columns(kind, size)
    table = [(str(code), "", True) for code in range(CLASSES)] if kind == "tar" else []
    ends = {name: np.arange(1, count + 1) * len(column) for name, column in known.items()}
    repeated = {name: Repeated(column, count) for name, column in known.items()}
    kinds = {"tar": tar_index.KIND, "tfrecord": tfrecord.KIND, "array_record": arrayrecord.KIND}
    index = Index(kinds[kind].name, described, table, [{}] * count, repeated, ends)
    index.write(folder / stored_index.INDEX)


def open_one(folder: pathlib.Path, kind: str) -> int:
    """Opens a set until the place of its last record is known; how many records it has."""
    if kind in ("prepared", "tar"):
        source = sources.open_train(Data(name=kind, path=str(folder), holdout=0.0036))
        source.fingerprint()
        if kind == "tar":
            assert len(source.read([len(source) - 1])[0].image) in (0, BYTES)
        return len(source)
    paths = sorted(map(str, folder.glob("images-*")))
    if kind == "tfrecord":
        records = tfrecord.TfRecords([(path, 0, PER_FILE[kind]) for path in paths])
        records.read([len(records) - 1])
        return len(records)
    files = [(path, 0, PER_FILE[kind]) for path in paths]
    records = arrayrecord.ArrayRecords(files, dict.fromkeys(paths, PER_FILE[kind]))
    records._chunks(paths[-1]).find(
        PER_FILE[kind] - 1
    )  # on a disk ArrayRecord's own reader would read
    return len(records)


def measure(folder: pathlib.Path, kind: str) -> None:
    """Prints what opening takes in this process."""
    before, start = _memory(), time.process_time()
    records = open_one(folder, kind)
    seconds, most = time.process_time() - start, _memory()
    print(
        f"{kind}: {records:,} records opened in {seconds:.2f} s of processor time; the process grew from {before:.0f} "
        f"to {most:.0f} MiB at most",
        flush=True,
    )


def _memory() -> float:
    """The most memory that this process ever had, in MiB."""
    status = pathlib.Path("/proc/self/status").read_text()  # getrusage(2) counts the parent, too
    return int(status.partition("VmHWM:")[2].split()[0]) / 1024


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("--records", type=int, default=14_200_000)
    parser.add_argument("--kinds", default=",".join(PER_FILE))
    parser.add_argument("--measure", action="store_true", help="only open what is there")
    arguments = parser.parse_args()
    for name in arguments.kinds.split(","):
        where = arguments.out / f"{name}-{arguments.records}"
        if arguments.measure:
            measure(where, name)
            continue
        if not where.exists():
            make(where, name, arguments.records)
        command = [sys.executable, "-m", "tests.benchmarks.stored_index", f"--out={arguments.out}"]
        command += [f"--records={arguments.records}", f"--kinds={name}", "--measure"]
        subprocess.run(command, check=True)
