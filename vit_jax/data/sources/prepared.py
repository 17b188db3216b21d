"""Data sets made by `vit_jax prepare`: ArrayRecord files, and one JSON file that describes them.

Lives here: the format, and reading it. Writing is in `preparation/`. The folder holds
SPLIT-00000-of-00007.array_record, …, SPLIT-labels.npy (where an image has one label: all of them,
int32, so that they are known without reading records), `report.jsonl` (what was found while
preparing) and `dataset.json`; a record is a MessagePack map of `image` (the bytes of an image file),
`label` (a number, a list of them, a mask as its source gives it, or nil) and `name`. What masks mean is in
`dataset.json` under `masks`.
"""

import errno
import io
import json
import os
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data import packing
from vit_jax.data.labels.segments import described
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataError, DataSet, Labels, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.arrayrecord import ArrayRecords

FORMAT = "vit_jax prepared, version 1"
DESCRIPTION = "dataset.json"

# What reading and unpacking a damaged record may raise.
_DAMAGED = (RuntimeError, ValueError, TypeError, IndexError)


def pack(record: Record) -> bytes:
    """The stored form of a record, whose image is encoded."""
    return packing.pack({"image": record.image, "label": record.label, "name": record.name})


def unpack(stored: bytes) -> Record:
    """The record of which `pack` made `stored`."""
    return Record(**packing.unpack(stored))


def read_description(folder: epath.PathLike) -> dict:
    """The content of `dataset.json` in `folder`.

    Raises:
      ConfigError: there is none, or one of another format.
    """
    path = epath.Path(folder).expanduser() / DESCRIPTION
    if not path.exists():
        raise ConfigError(
            f"{path.parent} has no {DESCRIPTION}: it is no data set made by 'vit_jax prepare', or not "
            "a finished one (the same command again continues)"
        )
    description = json.loads(path.read_text())
    if description.get("format") != FORMAT:
        raise ConfigError(f"{path}: the format is {description.get('format')!r}, not {FORMAT!r}")
    return description


def record_files(folder: epath.PathLike, description: dict) -> dict[str, int]:
    """The paths of the files of records in `folder`, with their bytes."""
    splits = description["splits"].values()
    shards = (shard for split in splits for shard in split["shards"])
    return {os.path.join(folder, shard["file"]): shard["bytes"] for shard in shards}


class Prepared:
    """Parts of a prepared data set, (split, start, stop) each."""

    def __init__(self, folder: str, parts: Sequence[tuple[str, int, int]], description: dict):
        self._args = folder, parts, description
        self._folder, self._parts, self._splits = folder, tuple(parts), description["splits"]
        self.classes = tuple(description["classes"])
        self.multi_label = description["multi_label"]
        self.masks = described(description.get("masks"), self.classes)
        files, examples, sizes = [], {}, {}
        for split, first, last in parts:
            begin = 0
            for shard in description["splits"][split]["shards"]:
                path, number = os.path.join(folder, shard["file"]), shard["examples"]
                start, stop = max(first - begin, 0), min(last - begin, number)
                if start < stop:
                    files.append((path, start, stop))
                    examples[path], sizes[path] = number, shard["bytes"]
                begin += number
        self._records = ArrayRecords(files, examples, sizes)

    def __reduce__(self):
        return Prepared, self._args  # open files do not travel to another process: it opens its own

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """A record that is damaged has an empty image, which the decoder refuses by its name; of one that the disk
        cannot read `BadImage` is raised.
        """
        try:
            return self._record(self._records[index])
        except DataError:  # the file, not the record
            raise
        except OSError as error:
            if error.errno != errno.EIO:
                raise
            path, row = self._records.place(index)
            raise BadImage(f"{path}, record {row}", os.strerror(errno.EIO)) from error
        except _DAMAGED:
            path, row = self._records.place(index)
            name = f"{path}, record {row} (damaged; 'vit_jax prepare --verify')"
            some_label = 0 if self.classes and self.masks is None else None
            return Record(b"", () if self.multi_label else some_label, name)

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; if one is damaged, one by one: the error is then its own."""
        try:
            return [self._record(stored) for stored in self._records.read(indices)]
        except DataError:
            raise
        except (OSError, *_DAMAGED):  # one of them
            return [self[index] for index in indices]

    def _record(self, stored: bytes) -> Record:
        example = unpack(stored)
        return Record(example.image, example.label, f"{self._folder}, {example.name}")

    @property
    def labels(self) -> Labels:
        """(n,) int32, read at every call; `None` where images have none or several, or where an
        earlier version prepared them.
        """
        if not all("labels" in self._splits[split] for split, _, _ in self._parts):
            return None
        arrays = []
        for split, start, stop in self._parts:
            path = epath.Path(self._folder) / self._splits[split]["labels"]["file"]
            if not path.exists():
                raise DataError(f"{path} is missing")
            # Of a bucket all at once; a local file is not in memory twice.
            in_bucket = places.in_bucket(path)
            file = io.BytesIO(places.read_bytes(path)) if in_bucket else places.open_bytes(path)
            with file:
                arrays.append(np.load(file)[start:stop])
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def fingerprint(self) -> str:
        """A fingerprint of the checksums of all files of the splits."""
        files = {
            split: [(shard["file"], shard["sha256"]) for shard in self._splits[split]["shards"]]
            for split, _, _ in self._parts
        }
        masks = () if self.masks is None else (self.masks,)
        return fingerprint.digest(self.classes, self._parts, files, *masks)


def open_prepared(config_data: Data) -> DataSet:
    """The data set that 'vit_jax prepare' made in the folder `config_data.path`."""
    if not config_data.path:
        raise ConfigError("config.data.path is empty: 'prepared' needs what 'prepare' has made")
    folder = epath.Path(config_data.path).expanduser()
    description = read_description(folder)
    return DataSet(
        str(folder),
        {name: split["examples"] for name, split in description["splits"].items()},
        lambda parts: Prepared(str(folder), parts, description),
        description["aliases"],
        lambda: json.dumps(description),
    )
