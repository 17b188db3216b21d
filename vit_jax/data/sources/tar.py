"""Images inside tar files (WebDataset's layout), read where they are: one scan of the tar headers
makes the index, after that every image is one read.

An image's label is in a file beside it, KEY.cls (text) or KEY.json (a field `label`); or else the
name of the folder that it is in; or else that of its tar file where that is a WordNet identifier
(n01440764.tar, as ImageNet is distributed). Images in no folder, or in none but those of splits, have
no labels if nothing beside them says one. Splits are the folders train/, test/, val/ or validation/ inside, or
those words in the names of the tar files (imagenet-train-000.tar). Tar files must not be compressed.
"""

import collections
import dataclasses
import json
import os
import re
import tarfile
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.images import check_bytes
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.listed import json_label
from vit_jax.data.sources.ranges import Ranges, open_to_scan
from vit_jax.data.sources.stored_index import scan_all
from vit_jax.data.sources.table import (
    SPLITS,
    SUFFIXES,
    Table,
    hold_out,
    label_at,
    natural,
    number_labels,
)
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.unused import Unused

_KIND = "tar 2"

_Place = tuple[int, str, int, int]  # number of the tar file, name inside, first byte, bytes


@dataclasses.dataclass(frozen=True)
class TarImages:
    """Images in tar files: `places` are the keys of the examples, the number of a file in `files`
    first.
    """

    files: tuple[str, ...]
    classes: tuple[str, ...]
    multi_label: bool
    places: tuple[_Place, ...]
    labels: np.ndarray | tuple[tuple[int, ...], ...] | None
    ranges: Ranges = dataclasses.field(default_factory=Ranges, compare=False, repr=False)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """See `record.Source`."""
        wanted = [self.places[index] for index in indices]
        parts = [(self.files[number], first, size) for number, _, first, size in wanted]
        names = [readable(f"{self.files[number]}, {name}") for number, name, _, _ in wanted]
        for (*_, size), name in zip(parts, names, strict=True):
            check_bytes(size, name)
        try:
            images = self.ranges.read_many(parts)
        except OSError as error:
            if len(names) > 1:  # which of them cannot be read?
                return [self[index] for index in indices]
            raise BadImage(names[0], error.strerror or str(error)) from None
        labels = [label_at(self.labels, index) for index in indices]
        return list(map(Record, images, labels, names))

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the names and sizes, and of all labels."""
        some = [self.places[i] for i in fingerprint.sampled(len(self))]
        names, sizes = [name for _, name, *_ in some], [size for *_, size in some]
        labels = fingerprint.of_labels(self.labels)
        return fingerprint.digest(self.classes, len(self), names, sizes, labels)


def open_tar(config_data: Data) -> DataSet:
    """The tar files that `config_data.path` names: one file, a folder of them, a pattern with *, or
    a range of numbers {000000..000146}. Without splits, some images are held out as 'test': see
    `table.hold_out`; the name that decides is the one inside the tar file.
    """
    files = find_tars(config_data.path)
    table = _read(files, config_data)
    return table.data_set(lambda *columns: TarImages(tuple(map(str, files)), *columns))


def find_tars(path: str) -> list:
    """The tar files that `path` names, sorted.

    Raises:
      ConfigError: there is none, or one of a range is missing.
    """
    if not path:
        raise ConfigError("config.data.path is empty: 'tar' needs a tar file, or a folder of them")
    place = epath.Path(path).expanduser()
    numbers = re.search(r"\{(\d+)\.\.(\d+)\}", str(place))
    if numbers:
        width = len(numbers[1])
        files = [
            epath.Path(str(place).replace(numbers[0], f"{i:0{width}}"))
            for i in range(int(numbers[1]), int(numbers[2]) + 1)
        ]
    elif "*" in path:
        files = sorted(place.parent.glob(place.name), key=lambda file: natural(file.name))
    elif place.is_dir():
        files = sorted(place.glob("*.tar"), key=lambda file: natural(file.name))
    else:
        files = [place]
    # Of many in a bucket one listing finds out, see `scan_all`.
    few = files if not places.in_bucket(place) or len(files) == 1 else []
    missing = [str(file) for file in few if not file.exists()]
    if missing or not files:
        absent = missing[0] if missing else path
        raise ConfigError(f"there is no tar file {absent}{places.nearest_existing(absent)}")
    return files


def _read(files: list, config_data: Data) -> Table:
    path, unused = config_data.path, Unused()
    found = scan_all([str(file) for file in files], _scan, _KIND)
    samples = [(number, *one) for number, of_file in enumerate(found) for one in of_file["images"]]
    for of_file in found:
        unused.add(of_file["unused"])
    if not samples:
        has = f"; it has {unused.text()}" if unused.text() else ""
        raise ConfigError(f"{path} has no images ({', '.join(SUFFIXES)}){has}")
    unused.report(path)
    texts, splits = [], []
    for number, name, _, _, beside in samples:
        folders = [part for part in os.path.dirname(name).split("/") if part not in ("", ".")]
        if not folders and re.fullmatch(r"n\d{8}", files[number].stem):
            folders = [files[number].stem]
        texts.append(beside if beside is not None or not folders else readable(folders[-1]))
        splits.append(_split(folders[:-1] if beside is None else folders, files[number].name))
    if not any(text is not None for *_, text in samples) and {*texts} <= {None, *SPLITS}:
        splits = [text or split for text, split in zip(texts, splits, strict=True)]
        texts = [None] * len(samples)
    classes, multi_label, labels = number_labels(
        texts,
        files[0].parent / "classes.txt",
        lambda i: f"{files[samples[i][0]]}, {readable(samples[i][1])}",
    )
    rows = collections.defaultdict(list)
    for split, sample, label in zip(splits, samples, labels, strict=True):
        rows[split].append((sample[:4], label))
    if "" in rows and len(rows) > 1:
        raise ConfigError(f"{path}: some images belong to a split, others to none")
    members = dict(rows)
    if "" in rows:
        members = hold_out(rows[""], config_data, path, lambda key: key[1])
    return Table(path, classes, multi_label, members)


def _scan(file: places.File) -> dict:
    """`images`: (name, first byte, bytes, label as text if it is beside) of those in a tar file; `unused`: see
    `Unused.counts`.
    """
    unused = Unused()
    images, labels = [], {}
    try:
        with open_to_scan(file) as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            for member in tar:
                key, suffix = _key(member.name)
                if not member.isfile() or os.path.basename(member.name).startswith("."):
                    continue
                if suffix == ".cls":
                    labels[key] = tar.extractfile(member).read().decode().strip()
                elif suffix == ".json":
                    if key not in labels:
                        label = json_label(json.load(tar.extractfile(member)))
                        labels |= {} if label is None else {key: label}
                elif unused.is_image(member.name):
                    images.append((member.name, member.offset_data, member.size, key))
    except (tarfile.TarError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file.path} cannot be read as an uncompressed tar file: {error!r}"
        ) from None
    pictures = {key for name, _, _, key in images if not _is_array(name)}
    samples = [
        (name, first, size, labels.get(key))
        for name, first, size, key in images
        if not (_is_array(name) and key in pictures)
    ]
    return {"images": samples, "unused": unused.counts()}


def _is_array(name: str) -> bool:
    """Whether it is a .npy file: an image, unless its sample has a picture."""
    return name.lower().endswith(".npy")


def _key(name: str) -> tuple[str, str]:
    """'a/0001.left.jpg' -> ('a/0001', '.jpg'): the sample, and what kind of file of it this is."""
    folder, base = os.path.split(name)
    return os.path.join(folder, base.partition(".")[0]), os.path.splitext(base)[1].lower()


def _split(folders: list[str], tar_name: str) -> str:
    """The split that the folders around an image name, or else the tar file's name; '' if neither."""
    words = folders + re.split(r"[^A-Za-z]+", tar_name)
    return next((word for word in words if word in SPLITS), "")
