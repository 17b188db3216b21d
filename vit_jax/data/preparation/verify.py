"""Reads all of a prepared data set back: every file against its checksum, every record decoded.

Files of a bucket are copied to this machine one after the other, so that ArrayRecord's own reader,
which verifies its checksums, reads them.
"""

import concurrent.futures
import contextlib
import functools
import hashlib
import os
import pathlib
import tempfile
from collections.abc import Iterator

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.progress import Progress
from vit_jax.data.labels.masks import ClassTable
from vit_jax.data.labels.segments import described
from vit_jax.data.options import MAX_PIXELS
from vit_jax.data.preparation import work
from vit_jax.data.preparation.check import check_label, examine
from vit_jax.data.preparation.shards import sha256
from vit_jax.data.record import BadImage, DataError
from vit_jax.data.sources import ranges
from vit_jax.data.sources.prepared import DESCRIPTION, read_description, unpack
from vit_jax.data.sources.readers import open_reader


def verify(folder: str, *, workers: int = 0) -> dict:
    """What is wrong with the prepared data set in `folder`, which may be in a bucket.

    Returns:
      {"examples": records read and found good, "bad": [{"name", "why"}]}: of files that are missing
      or have changed, and of records that cannot be read.

    Raises:
      ConfigError: there is no finished data set.
    """
    folder = places.locate(folder)
    _check_finished(folder)
    description = read_description(folder)
    bad, good = [], 0
    files = [shard for split in description["splits"].values() for shard in split["shards"]]
    classes, masks = (
        len(description["classes"]),
        described(description.get("masks"), description["classes"]),
    )
    for split in description["splits"].values():
        if "labels" in split and (why := _wrong_labels(folder, split["labels"])):
            bad.append({"name": split["labels"]["file"], "why": why})
    with (
        Progress(sum(shard["examples"] for shard in files), "images", "verified") as progress,
        concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool,
        _copies(folder, files) as copies,
    ):
        for shard, (path, why) in zip(files, copies, strict=True):
            if why:
                bad.append({"name": shard["file"], "why": why})
            if path is None:
                continue
            reader = open_reader(str(path))
            number = min(reader.num_records(), shard["examples"])
            if number != shard["examples"]:
                why = f"{reader.num_records()} records, there should be {shard['examples']}"
                bad.append({"name": shard["file"], "why": why})
            for why in pool.map(functools.partial(_wrong, reader, classes, masks), range(number)):
                progress.update(1)
                if why:
                    bad.append({"name": f"{shard['file']}, record {why[0]}", "why": why[1]})
                else:
                    good += 1
    return {"examples": good, "bad": bad}


def _check_finished(folder: epath.Path) -> None:
    """Raises `ConfigError` if files of a data set are still to be written."""
    if (folder / DESCRIPTION).exists() or not (notes := work.noted(folder)):
        return
    done = sum(name.endswith(".array_record.json") for name in notes)
    raise ConfigError(
        f"{folder} is not finished: {done} files are done, others are missing or half-written. Start the command that "
        "makes it again, each --shard of it: what is done is kept"
    )


@contextlib.contextmanager
def _copies(
    folder: epath.Path, files: list[dict]
) -> Iterator[Iterator[tuple[pathlib.Path | None, str]]]:
    """(a local path, what is wrong with it) of each file: while one is being read, the next one is
    copied. No path: it is missing or not whole.
    """
    with (
        tempfile.TemporaryDirectory(prefix="vit_jax-verify-") as scratch,
        concurrent.futures.ThreadPoolExecutor(1) as copier,
    ):

        def all_of_them() -> Iterator[tuple[pathlib.Path | None, str]]:
            ahead = [copier.submit(_copy, folder, files[0], pathlib.Path(scratch))]
            for i in range(len(files)):
                if i + 1 < len(files):
                    ahead.append(copier.submit(_copy, folder, files[i + 1], pathlib.Path(scratch)))
                path, why = ahead.pop(0).result()
                yield path, why
                if path and path.is_relative_to(scratch):
                    path.unlink()

        yield all_of_them() if files else iter(())


def _copy(folder: epath.Path, file: dict, scratch: pathlib.Path) -> tuple[pathlib.Path | None, str]:
    path = folder / file["file"]
    try:
        size = places.describe_file(path).size
        if size != file["bytes"]:
            return None, f"it has {size} bytes, there should be {file['bytes']}: half-uploaded?"
        if places.in_bucket(path):
            local = scratch / file["file"]
            ranges.copy(str(path), size, local)
        else:
            local = pathlib.Path(path)
    except FileNotFoundError:
        return None, "the file is missing"
    except DataError as error:
        return None, str(error)
    return local, "" if sha256(local) == file["sha256"] else "its checksum has changed"


def _wrong_labels(folder: epath.Path, file: dict) -> str:
    """What is wrong with a file of labels; '' if nothing is."""
    try:
        content = places.read_bytes(folder / file["file"])
    except FileNotFoundError:
        return "the file is missing"
    right = hashlib.sha256(content).hexdigest() == file["sha256"]
    return "" if right else "its checksum has changed"


def _wrong(reader, classes: int, masks: ClassTable | None, row: int) -> tuple[str, str] | None:
    """The place of a record and what is wrong with it; `None` if it is good."""
    place = str(row)
    try:
        record = unpack(reader.read([row])[0])
        place = f"{row} ({record.name})"
        pixels, _ = examine(record.image, record.name)
        check_label(record, classes, masks, pixels.shape[:2], MAX_PIXELS)
    except BadImage as error:
        return place, error.why
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return place, f"damaged: {error}"
    return None
