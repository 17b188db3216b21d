"""Reads all of a prepared data set back: every file against its checksum, every record decoded."""

import concurrent.futures
import functools
import os
import pathlib

from tqdm import tqdm

from vit_jax.data.preparation.check import check_label, examine
from vit_jax.data.preparation.shards import sha256
from vit_jax.data.record import BadImage
from vit_jax.data.sources.arrayrecord import open_reader
from vit_jax.data.sources.prepared import read_description, unpack


def verify(folder: str, *, workers: int = 0) -> dict:
    """What is wrong with the prepared data set in `folder`.

    Returns:
      {"examples": records read and found good, "bad": [{"name", "why"}]}: of files that are missing
      or have changed, and of records that cannot be read.
    """
    folder = pathlib.Path(folder).expanduser()
    description = read_description(folder)
    bad, good = [], 0
    files = [shard for split in description["splits"].values() for shard in split["shards"]]
    total = sum(shard["examples"] for shard in files)
    classes = len(description["classes"])
    with (
        tqdm(total=total, unit="img", smoothing=0.05, dynamic_ncols=True) as bar,
        concurrent.futures.ThreadPoolExecutor(workers or os.cpu_count()) as pool,
    ):
        for split in description["splits"].values():
            if "labels" in split and (why := _changed(folder, split["labels"])):
                bad.append({"name": split["labels"]["file"], "why": why})
        for shard in files:
            path = folder / shard["file"]
            if why := _changed(folder, shard):
                bad.append({"name": shard["file"], "why": why})
            if not path.exists():
                continue
            reader = open_reader(str(path))
            number = min(reader.num_records(), shard["examples"])
            if number != shard["examples"]:
                why = f"{reader.num_records()} records, there should be {shard['examples']}"
                bad.append({"name": shard["file"], "why": why})
            for why in pool.map(functools.partial(_wrong, reader, classes), range(number)):
                bar.update(1)
                if why:
                    bad.append({"name": f"{shard['file']}, record {why[0]}", "why": why[1]})
                else:
                    good += 1
    return {"examples": good, "bad": bad}


def _changed(folder: pathlib.Path, file: dict) -> str:
    """What is wrong with a file, of which the description has the name and the checksum; '' if
    nothing is.
    """
    path = folder / file["file"]
    if not path.exists():
        return "the file is missing"
    return "" if sha256(path) == file["sha256"] else "its checksum has changed"


def _wrong(reader, classes: int, row: int) -> tuple[str, str] | None:
    """The place of a record and what is wrong with it; `None` if it is good."""
    place = str(row)
    try:
        record = unpack(reader.read([row])[0])
        place = f"{row} ({record.name})"
        examine(record.image, record.name)
        check_label(record, classes)
    except BadImage as error:
        return place, error.why
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        return place, f"damaged: {error}"
    return None
