"""Data sets made by `vit_jax prepare`: ArrayRecord files, and one JSON file that describes them.

Lives here: the format, and reading it. Writing is in `preparation/`. The folder holds
SPLIT-00000-of-00007.array_record, …, `report.jsonl` (what was found while preparing) and
`dataset.json`; a record is a MessagePack map of `image` (the bytes of an image file), `label` (a
number, or a list of them) and `name`.
"""

import json
import os
from collections.abc import Sequence

import msgpack
from etils import epath

from vit_jax.base.errors import ConfigError
from vit_jax.data.record import DataError, DataSet, Record
from vit_jax.data.sources.arrayrecord import ArrayRecords

FORMAT = "vit_jax prepared, version 1"
DESCRIPTION = "dataset.json"


def pack(record: Record) -> bytes:
    """What is stored of `record`, whose image is encoded."""
    label = list(record.label) if isinstance(record.label, tuple) else record.label
    return msgpack.packb({"image": record.image, "label": label, "name": record.name})


def unpack(stored: bytes) -> Record:
    """The record of which `pack` made `stored`."""
    return Record(**msgpack.unpackb(stored, use_list=False))


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
        self._args = folder, parts, description
        self._folder = folder
        self.classes = tuple(description["classes"])
        self.multi_label = description["multi_label"]
        files, examples = [], {}
        for split, first, last in parts:
            begin = 0
            for shard in description["splits"][split]["shards"]:
                path, number = os.path.join(folder, shard["file"]), shard["examples"]
                start, stop = max(first - begin, 0), min(last - begin, number)
                if start < stop:
                    files.append((path, start, stop))
                    examples[path] = number
                begin += number
        self._records = ArrayRecords(files, examples)

    def __reduce__(self):
        return Prepared, self._args  # open files do not travel to another process: it opens its own

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        """A record that is damaged has an empty image, which the decoder refuses by its name."""
        try:
            found = unpack(self._records[index])
            return Record(found.image, found.label, f"{self._folder}, {found.name}")
        except DataError:  # the file, not the record
            raise
        except (RuntimeError, ValueError, TypeError, IndexError):
            path, row = self._records.place(index)
            name = f"{path}, record {row} (damaged; 'vit_jax prepare --verify')"
            return Record(b"", () if self.multi_label else 0, name)


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
