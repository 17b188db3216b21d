"""Images with captions: a list of files with their texts, CSV or JSON lines, or a folder that has one; or tar files,
see `pairs_tar`; or a folder of TFDS, see `pairs_tfds`.

A CSV file has the columns `path` (or `file`, `file_name`, `image`; relative to its folder) and `caption` (or `text`),
and if you like `split`; an image with several captions has a line for each. In JSON lines each line is an object with
the same fields, whose `captions` may be a list. In a folder the list is captions.csv, captions.jsonl, metadata.jsonl
or another file of these types, if there is one alone.
"""

import csv
import dataclasses
import io
from collections.abc import Iterator, Sequence

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.captions import TEXT, captions_in, report_unpaired, text_of
from vit_jax.data.sources.folder import ImageFiles
from vit_jax.data.sources.split_names import find_splits
from vit_jax.data.sources.table import Table, hold_out
from vit_jax.data.sources.text import json_rows, read_text

_FILE = ("path", "file", "file_name", "filename", "image", "filepath")
_JSON = (".jsonl", ".json", ".ndjson")
_USUAL = ("captions.csv", "captions.jsonl", "captions.json", "metadata.jsonl", "metadata.csv")

_Row = tuple[int, str, tuple[str, ...], str]  # line, file, captions, split


@dataclasses.dataclass(frozen=True)
class ImagePairs:
    """Image files, and the captions of each."""

    images: ImageFiles
    of_images: tuple[tuple[str, ...], ...]
    classes: tuple[str, ...] = ()
    multi_label: bool = False
    labels: None = None

    def __len__(self) -> int:
        return len(self.of_images)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order."""
        records = self.images.read(indices)
        return [
            dataclasses.replace(record, label=self.of_images[index])
            for index, record in zip(indices, records, strict=True)
        ]

    def captions(self, index: int) -> tuple[str, ...]:
        """The captions of an image."""
        return self.of_images[index]

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the files and of all captions."""
        return fingerprint.digest(self.images.fingerprint(), self.of_images)


def open_pairs(config_data: Data) -> DataSet:
    """The pairs at `config_data.path`. Without splits of their own, the share `config_data.holdout` becomes 'test',
    chosen by file name.

    Raises:
      ConfigError: there are none, or a list cannot be understood.
    """
    if not config_data.path:
        raise ConfigError(
            "config.data.path is empty: 'pairs' needs a list of images and captions (CSV or JSON lines), the folder of "
            "one, tar files, or a data set's folder of TFDS"
        )
    path = epath.Path(config_data.path).expanduser()
    if not (is_list := path.suffix.lower() in (*_JSON, ".csv")) or not path.exists():
        is_folder = path.is_dir()
        names = sorted(places.names_in(path)) if is_folder else []
        listed = _list_in(path, names)
        if listed is None and is_folder:
            from vit_jax.data.sources import pairs_tfds

            if pairs_tfds.is_prepared(path):
                return pairs_tfds.open_tfds_pairs(path, config_data)
            if not any(name.endswith(".tar") for name in names):
                raise ConfigError(
                    f"config.data.path = {config_data.path!r} has neither tar files nor a list of images and captions: "
                    f"write one, such as {_USUAL[0]} with the columns path and caption"
                )
        if listed is None and (is_folder or path.suffix == ".tar" or {*"*{"} & {*str(path)}):
            from vit_jax.data.sources.pairs_tar import open_tars

            return open_tars(config_data)
        if listed is None:
            hint = "" if is_list else "; it must be a CSV, a JSON lines file, a folder or tar files"
            where = places.nearest_existing(str(path))
            raise ConfigError(
                f"config.data.path = {config_data.path!r} does not exist{where}{hint}"
            )
        path = listed
    table = _read_pairs(path, config_data)

    def make(classes, multi_label, keys, labels) -> ImagePairs:
        files, texts = zip(*keys, strict=True)
        return ImagePairs(ImageFiles(str(path.parent), (), False, files, None), texts)

    return table.data_set(make)


def _list_in(folder: epath.Path, names: list[str]) -> epath.Path | None:
    """The list of pairs among the files in a folder; `None` if there is none."""
    usual = [name for name in _USUAL if name in names]
    others = [name for name in names if epath.Path(name).suffix.lower() in (".jsonl", ".csv")]
    if not usual and len(others) > 1:
        raise ConfigError(
            f"{folder} has {len(others)} lists ({', '.join(others[:3])}, …): set --config.data.path to the one with "
            "captions"
        )
    return next((folder / name for name in (*usual, *others)), None)


def _read_pairs(path: epath.Path, config_data: Data) -> Table:
    texts: dict[str, list[str]] = {}
    splits: dict[str, str] = {}
    for line, file, captions, split in (
        json_rows(path, _FILE, captions_in) if path.suffix in _JSON else _csv_rows(path)
    ):
        if splits.setdefault(file, split) != split:
            raise ConfigError(
                f"{path}, line {line}: {file} is in two splits, {splits[file]!r} and {split!r}"
            )
        texts.setdefault(file, []).extend(captions)
    without = [file for file, captions in texts.items() if not captions]
    if len(without) == len(texts):
        raise ConfigError(
            f"{path} has no image with a caption: it needs the fields path and caption"
        )
    report_unpaired(str(path), "images have no caption", len(without), without[:1])
    members: dict[str, list] = {}
    spelled = find_splits(filter(None, splits.values()))
    for file, captions in texts.items():
        if captions:
            key = file, tuple(dict.fromkeys(captions))
            split = spelled.get(splits[file], splits[file])
            members.setdefault(split, []).append((key, None))
    if set(members) == {""}:
        members = hold_out(members[""], config_data, str(path), name=lambda key: key[0])
    elif "" in members:
        raise ConfigError(f"{path}: some images have a split, others none")
    return Table(str(path), (), False, members, spelled=spelled)


def _csv_rows(path: epath.Path) -> Iterator[_Row]:
    reader = csv.DictReader(io.StringIO(read_text(path), newline=""))
    try:
        header = reader.fieldnames or []
        file, text = (next((n for n in names if n in header), None) for names in (_FILE, TEXT))
        if file is None or text is None:
            raise ConfigError(
                f"{path} must begin with the column names path and caption, not {','.join(header)!r}"
            )
        for row in reader:
            if None in row or None in row.values() or not row[file]:
                raise ConfigError(
                    f"{path}, line {reader.line_num}: {len(header)} values are needed, path not empty; a caption "
                    "with a comma stands in quotation marks"
                )
            yield reader.line_num, row[file], text_of(row[text]), row.get("split", "")
    except csv.Error as error:
        raise ConfigError(f"{path}, line {reader.line_num}: this is no CSV: {error}") from None
