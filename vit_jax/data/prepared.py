"""Data sets made by `vit_jax prepare`: ArrayRecord files, and one JSON file that describes them.

Lives here: the format, and reading it. Writing is in `preparation/`. The folder holds
SPLIT-00000-of-00007.array_record, …, `report.jsonl` (what was found while preparing) and
`dataset.json`; a record is a MessagePack map of `image` (the bytes of an image file), `label` (a
number, or a list of them) and `name`.
"""

import bisect
import collections
import functools
import itertools
import json
from collections.abc import Sequence

import msgpack
from etils import epath

from vit_jax.data.record import DataError, DataSet, Record
from vit_jax.schema import ConfigError

FORMAT = "vit_jax prepared, version 1"
DESCRIPTION = "dataset.json"


def pack(record: Record) -> bytes:
    """What is stored of `record`, whose image is encoded."""
    label = list(record.label) if isinstance(record.label, tuple) else record.label
    return msgpack.packb({"image": record.image, "label": label, "name": record.name})


def unpack(stored: bytes) -> Record:
    """The record of which `pack` made `stored`."""
    return Record(**msgpack.unpackb(stored, use_list=False))


def open_reader(path: str):
    """An ArrayRecord reader of the file `path`."""
    from array_record.python.array_record_module import ArrayRecordReader

    # Read-ahead is for reading in order; at random places it reads what nobody wants.
    return ArrayRecordReader(path, options="readahead_buffer_size:0")


def read_description(folder) -> dict:
    """The content of `dataset.json` in `folder`.

    Raises:
      ConfigError: there is none, or one of another format.
    """
    path = epath.Path(folder).expanduser() / DESCRIPTION
    if not path.exists():
        raise ConfigError(
            f"{path.parent} has no {DESCRIPTION}: it is no data set made by 'vit_jax prepare', or not "
            "a finished one (the same command again goes on)"
        )
    description = json.loads(path.read_text())
    if description.get("format") != FORMAT:
        raise ConfigError(f"{path}: the format is {description.get('format')!r}, not {FORMAT!r}")
    return description


class Prepared:
    """Parts of a prepared data set, (split, start, stop) each."""

    def __init__(self, folder: str, parts: Sequence[tuple[str, int, int]], description: dict):
        self._folder, self._parts, self._description = folder, tuple(parts), description
        self.classes = tuple(description["classes"])
        self.multi_label = description["multi_label"]
        self._ends = list(itertools.accumulate(stop - start for _, start, stop in self._parts))
        self._shards = {name: _shard_ends(description, name) for name, _, _ in self._parts}

    def __reduce__(self):
        return Prepared, (self._folder, self._parts, self._description)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records of `indices`, those of a file in one go.

        A record that is damaged has an empty image, which the decoder refuses by its name.
        """
        wanted = collections.defaultdict(list)
        for place, index in enumerate(indices):
            file, row = self._find(int(index))
            wanted[file].append((row, place))
        records = [None] * len(indices)
        for file, rows in wanted.items():
            found = self._read_file(file, [row for row, _ in rows])
            for (_, place), record in zip(rows, found, strict=True):
                records[place] = record
        return records

    def _find(self, index: int) -> tuple[str, int]:
        """The file that holds example `index`, and its number in there."""
        part = bisect.bisect_right(self._ends, index)
        name, start, stop = self._parts[part]
        row = index - (self._ends[part] - (stop - start)) + start
        ends = self._shards[name]
        shard = bisect.bisect_right(ends, row)
        before = ends[shard - 1] if shard else 0
        return self._description["splits"][name]["shards"][shard]["file"], row - before

    def _read_file(self, file: str, rows: list[int]) -> list[Record]:
        try:
            found = map(unpack, self._reader(file).read(rows))
            return [Record(one.image, one.label, f"{self._folder}, {one.name}") for one in found]
        except (RuntimeError, ValueError, TypeError, IndexError):
            if len(rows) > 1:
                return [self._read_file(file, [row])[0] for row in rows]
            name = f"{self._folder}/{file}, record {rows[0]} (damaged; 'vit_jax prepare --verify')"
            return [Record(b"", () if self.multi_label else 0, name)]

    @functools.cached_property
    def _readers(self) -> dict:
        return {}

    def _reader(self, file: str):
        if file not in self._readers:
            path = epath.Path(self._folder) / file
            reader = open_reader(str(path)) if path.exists() else None
            (number,) = (
                shard["examples"]
                for split in self._description["splits"].values()
                for shard in split["shards"]
                if shard["file"] == file
            )
            if reader is None or reader.num_records() != number:
                there = "missing" if reader is None else f"damaged: {reader.num_records()} records"
                raise DataError(f"{path} is {there}, {DESCRIPTION} says {number} records")
            self._readers[file] = reader
        return self._readers[file]


def open_prepared(config_data) -> DataSet:
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


def _shard_ends(description: dict, split: str) -> list[int]:
    shards = description["splits"][split]["shards"]
    return list(itertools.accumulate(shard["examples"] for shard in shards))
