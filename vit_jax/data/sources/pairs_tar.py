"""Images with captions inside tar files (WebDataset's layout): KEY.jpg with KEY.txt, one caption, or KEY.json, whose
field `caption`, `captions` or `text` has one or several. One scan of the tar headers makes the index; after that every
pair is two reads. Splits are the words train, test, val or validation in the names of the tar files.
"""

import json
import os
import tarfile
from collections.abc import Sequence

import numpy as np

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.decoding.images import check_bytes
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.captions import captions_in, report_unpaired, text_of
from vit_jax.data.sources.columns import FileColumns, Index
from vit_jax.data.sources.ranges import open_to_scan
from vit_jax.data.sources.split_names import aliases, splits_of_files
from vit_jax.data.sources.stored_index import Kind, find_records
from vit_jax.data.sources.table import SUFFIXES, held_out, name_number
from vit_jax.data.sources.tar import TarRecords, find_tars
from vit_jax.data.sources.text import readable

_COLUMNS = ("first", "size", "text_first", "text_size", "is_json")


class TarPairs(TarRecords):
    """Pairs in tar files."""

    classes, multi_label, labels = (), False, None

    def __init__(self, index: Index, rows: np.ndarray, opened: tuple):
        """`rows`: (n, 2) int64, the number of a file and of a pair in it; `opened`: of `TarRecords`."""
        super().__init__(rows, opened)
        self._index, self._files = index, list(index.files)

    def _read(self, indices: Sequence[int]) -> list[Record]:
        wanted = [self._place(index) for index in indices]
        for _, (_, size, *_), name in wanted:
            check_bytes(size, name)
        images = [(path, first, size) for path, (first, size, *_), _ in wanted]
        texts = [(path, first, size) for path, (_, _, first, size, _), _ in wanted]
        contents = self._ranges.read_many([*images, *texts])
        pairs = zip(wanted, contents[: len(images)], contents[len(images) :], strict=True)
        return [
            Record(image, _captions(text, place[4], name), name)
            for (_, place, name), image, text in pairs
        ]

    def _name(self, index: int) -> str:
        return self._place(index)[2]

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions of an image, which is not read."""
        path, (_, _, first, size, is_json), name = self._place(index)
        return _captions(self._ranges.read(path, first, size), is_json, name)

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the names and sizes."""
        some = [self._place(i) for i in fingerprint.sampled(len(self))]
        return fingerprint.digest(len(self), [(place[1:4:2], name) for _, place, name in some])

    def _place(self, index: int) -> tuple[str, tuple[int, ...], str]:
        """The tar file, the values of `_COLUMNS`, and the name of a pair."""
        file, row = map(int, self._rows[index])
        path = os.path.join(self._index.folder, self._files[file])
        values = tuple(int(self._index.column(name, file)[row]) for name in _COLUMNS)
        return path, values, readable(f"{path}, byte {values[0]}")


def open_tars(config_data: Data) -> DataSet:
    """The pairs in the tar files that `config_data.path` names, see `tar.find_tars`.

    Raises:
      ConfigError: there are no such files, or no pairs in them.
    """
    path = config_data.path
    files = [str(file) for file in find_tars(path)]
    index = find_records(files, KIND)
    members: dict[str, list[np.ndarray]] = {}
    images, texts = 0, 0
    splits = splits_of_files(list(map(os.path.basename, files)))
    for file, split in zip(files, splits, strict=True):
        number = index.number(file)
        images, texts = (a + b for a, b in zip((images, texts), index.notes[number], strict=True))
        rows = np.arange(index.count("first", number))
        rows = np.stack([np.full_like(rows, number), rows], axis=1)
        members.setdefault(split, []).append(rows)
    report_unpaired(path, "images have no caption", images, files)
    report_unpaired(path, "captions have no image", texts, files)
    rows_of = {split: np.concatenate(parts) for split, parts in members.items()}
    if not sum(map(len, rows_of.values())):
        raise ConfigError(
            f"{path} has no pairs: an image ({', '.join(SUFFIXES)}) needs a file of the same name that ends in "
            ".txt or .json"
        )
    if "" in rows_of:
        if len(rows_of) > 1:
            raise ConfigError(f"{path}: the names of some tar files have a split, others none")
        rows = rows_of[""]
        hashes = np.concatenate([index.column("hash", index.number(file)) for file in files])
        out = held_out(hashes, None, config_data, path)
        rows_of = {"train": rows[~out], "test": rows[out]}
    sizes = {name: len(rows) for name, rows in rows_of.items()}

    def read(parts: list[tuple[str, int, int]]) -> TarPairs:
        rows = np.concatenate([rows_of[name][start:stop] for name, start, stop in parts])
        return TarPairs(index, rows, (open_tars, config_data, parts))

    return DataSet(path, sizes, read, aliases(sizes))


def _captions(content: bytes, is_json: int, name: str) -> tuple[str, ...]:
    try:
        text = content.decode()
        return captions_in(json.loads(text)) if is_json else text_of(text)
    except (ValueError, AttributeError) as error:
        raise BadImage(name, f"its caption cannot be read: {error}") from None


def _scan(file: places.File) -> FileColumns:
    """The columns of the pairs in a tar file; the note is how many images and texts are no pair."""
    images: dict[str, tuple[str, int, int]] = {}
    texts: dict[str, tuple[bool, int, int]] = {}
    try:
        with open_to_scan(file) as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                folder, base = os.path.split(member.name)
                key, suffix = os.path.splitext(base)
                key, suffix = os.path.join(folder, key), suffix.lower()
                if not member.isfile() or base.startswith("."):
                    continue
                place = member.offset_data, member.size
                if suffix == ".txt" or (suffix == ".json" and key not in texts):
                    texts[key] = (suffix == ".json", *place)
                elif suffix in SUFFIXES:
                    images[key] = (member.name, *place)
    except tarfile.TarError as error:
        raise ConfigError(
            f"{file.path} cannot be read as an uncompressed tar file: {error!r}"
        ) from None
    keys = [key for key in images if key in texts]
    rows = [(*images[key][1:], *texts[key][1:], texts[key][0]) for key in keys]
    columns = dict(zip(_COLUMNS, np.asarray(rows, np.int64).reshape(-1, 5).T, strict=True))
    columns["hash"] = np.asarray([name_number(images[key][0]) for key in keys], "<u8")
    return FileColumns(columns, (), [len(images) - len(keys), len(texts) - len(keys)])


KIND = Kind("pairs 1", _scan)
