"""Images inside tar files (WebDataset's layout), read where they are: one scan of the tar headers
makes the index, after that every image is one read.

An image's label is in a file beside it, KEY.cls (text) or KEY.json (a field `label`); or else the
name of the folder that it is in; or else that of its tar file where that is a WordNet identifier
(n01440764.tar, as ImageNet is distributed). Images in no folder, or in none but those of splits, have
no labels if nothing beside them says one. Splits are the folders train/, test/, val/ or the like inside, or
those words in the names of the tar files (imagenet-train-000.tar), see `split_names.py`. Tar files must not be
compressed.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from etils import epath

from vit_jax.base import limits, places
from vit_jax.base.errors import ConfigError
from vit_jax.data.decoding.images import check_bytes
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataSet, Label, Labels, Record
from vit_jax.data.sources import fingerprint, tar_index, zip_index
from vit_jax.data.sources.beside import MASKS
from vit_jax.data.sources.ranges import Ranges
from vit_jax.data.sources.split_names import aliases, find_splits, has_both_sides, splits_of_files
from vit_jax.data.sources.stored_index import Kind
from vit_jax.data.sources.summary import Summary, count_labels
from vit_jax.data.sources.table import (
    SUFFIXES,
    digest_rows,
    held_out,
    held_out_split,
    label_at,
    natural,
    number_labels,
)
from vit_jax.data.sources.tar_index import Place, TarIndex
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.unused import Unused
from vit_jax.data.sources.zip_index import inflate

_COUNTED = 1 << 20  # labels at a time


class TarRecords:
    """What records in tar files have in common: they are read together, and one by one where that fails."""

    def __init__(self, rows: range | np.ndarray, opened: tuple):
        """Args:
        rows: which records of the tar files these are.
        opened: the function, `config.data` and the parts by which another process opens the same.
        """
        self._rows, self._opened, self._ranges = rows, opened, Ranges()

    def __reduce__(self):
        return _reopen, self._opened  # what is mapped into memory does not travel

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; what is read of them is requested at once.

        Raises:
          BadImage: one of them cannot be read.
        """
        try:
            return self._read(indices)
        except OSError as error:
            if limits.is_shortage(error):
                raise
            if len(indices) > 1:  # which of them cannot be read?
                return [self[index] for index in indices]
            raise BadImage(self._name(indices[0]), error.strerror or str(error)) from None

    def _read(self, indices: Sequence[int]) -> list[Record]:
        """`read`, which raises `OSError` if any of them cannot be read."""
        raise NotImplementedError

    def _name(self, index: int) -> str:
        raise NotImplementedError


class TarImages(TarRecords):
    """Images in tar files."""

    def __init__(
        self,
        tars: TarIndex,
        rows: range | np.ndarray,
        classes: tuple[str, ...],
        multi_label: bool,
        labels: Labels,
        named_by_folders: bool,
        opened: tuple,
    ):
        """`rows` and `opened`: of `TarRecords`; `named_by_folders`: whether classes are called as folders."""
        super().__init__(rows, opened)
        self._tars = tars
        self.named_by_folders = named_by_folders
        self.classes, self.multi_label, self.labels = classes, multi_label, labels

    def _read(self, indices: Sequence[int]) -> list[Record]:
        files = self._tars.files
        wanted = [self._tars.place(int(self._rows[index])) for index in indices]
        parts = [(files[number], first, size) for number, _, first, size in wanted]
        names = [self._name_at(place) for place in wanted]
        sizes = [self._tars.inflated(int(self._rows[index])) for index in indices]
        for (*_, size), inflated, name in zip(parts, sizes, names, strict=True):
            check_bytes(inflated or size, name)
        images = self._ranges.read_many(parts)
        if any(sizes):
            packed = zip(images, sizes, names, strict=True)
            images = [inflate(image, size, name) if size else image for image, size, name in packed]
        labels = [label_at(self.labels, index) for index in indices]
        return list(map(Record, images, labels, names))

    def _name(self, index: int) -> str:
        return self._name_at(self._tars.place(int(self._rows[index])))

    def _name_at(self, place: Place) -> str:
        number, name, *_ = place
        return readable(f"{self._tars.files[number]}, {name}")

    def fingerprint(self) -> str:
        """A fingerprint of a sample of the names and sizes, and of all labels."""
        some = self._tars.sample(int(self._rows[i]) for i in fingerprint.sampled(len(self)))
        names, sizes = [name for _, name, *_ in some], [size for *_, size in some]
        labels = fingerprint.of_labels(self.labels)
        return fingerprint.digest(self.classes, len(self), names, sizes, labels)


def open_tar(config_data: Data) -> DataSet:
    """The tar files that `config_data.path` names: one file, a folder of them, a pattern with *, or
    a range of numbers {000000..000146}. Without splits, some images are held out as 'test': see
    `table.hold_out`; the name that decides is the one inside the tar file.
    """
    path, unused = config_data.path, Unused()
    files = find_tars(path)
    tars = TarIndex([str(file) for file in files], archive_kind(files))
    for counts in tars.unused():
        unused.add(counts)
    if not len(tars):
        has = f"; it has {unused.text()}" if unused.text() else ""
        raise ConfigError(f"{path} has no images ({', '.join(SUFFIXES)}){has}")
    unused.warn_of_pictures(path)
    if masks := tars.masks():
        _check_masks(masks[0], config_data.mask_files)
    meaning = _understand(tars, files, config_data)
    members = tars.rows_by_split(meaning.splits, meaning.file_splits)
    if "" in members and len(members) > 1:
        raise ConfigError(
            f"{path}: some images belong to a split ({', '.join(filter(None, members))}), others to none: set "
            "--config.data.layout=classes if no folder or file is a split, or name the folders of all alike"
        )

    def labels_of(rows: range | np.ndarray) -> Labels:
        return tars.labels(rows, meaning.labels, meaning.file_labels) if meaning.classes else None

    # Of a set with splits only where all of it is one.
    is_held_out = len(members) == 1 and held_out_split(members, config_data) is not None
    if is_held_out:
        by_class = config_data.holdout_by == "class"
        members = tars.held_out(
            lambda hashes, rows: held_out(
                hashes, labels_of(rows) if by_class else None, config_data, path
            ),
            at_once=by_class,
        )
    sizes = {name: len(rows) for name, rows in members.items()}

    def read(parts: list[tuple[str, int, int]]) -> TarImages:
        selected = [members[name][start:stop] for name, start, stop in parts]
        labels = _joined([labels_of(rows) for rows in selected])
        described = meaning.classes, meaning.multi_label, labels, meaning.named_by_folders
        return TarImages(tars, _joined(selected), *described, (open_tar, config_data, parts))

    def identity() -> str:
        rows = {name: _labelled(tars, of_split, labels_of) for name, of_split in members.items()}
        return digest_rows(meaning.classes, meaning.multi_label, sizes, rows)

    def counts() -> dict[str, np.ndarray]:
        return {
            name: _count_classes(rows, labels_of, len(meaning.classes))
            for name, rows in members.items()
        }

    summary = Summary(
        path,
        sizes,
        meaning.spelled,
        is_held_out,
        meaning.classes,
        counts,
        meaning.labels_from,
        unused.reasons(),
    )
    return DataSet(path, sizes, read, aliases(sizes, meaning.spelled), identity, summary)


def _count_classes(
    rows: range | np.ndarray, labels_of: Callable[[range | np.ndarray], Labels], classes: int
) -> np.ndarray:
    """How many images of each class there are, (classes,), of which a part at a time is looked at."""
    counts = np.zeros(classes, np.int64)
    for first in range(0, len(rows), _COUNTED):
        counts += count_labels(labels_of(rows[first : first + _COUNTED]), classes)
    return counts


def _reopen(
    opener: Callable[[Data], DataSet], config_data: Data, parts: list[tuple[str, int, int]]
) -> TarRecords:
    return opener(config_data).read(parts)


def _joined(parts: list):
    """One range, array or tuple of several; `None` of nothing but that."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    if isinstance(parts[0], tuple):
        return tuple(itertools.chain.from_iterable(parts))
    return np.concatenate([np.asarray(part) for part in parts])


def _labelled(
    tars: TarIndex, rows: range | np.ndarray, labels_of: Callable[[range | np.ndarray], Labels]
) -> Iterator[tuple[Place, Label]]:
    """Places and labels of images."""
    labels = labels_of(rows)
    for i, place in enumerate(tars.places(rows)):
        yield place, label_at(labels, i)


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
        inside = list(place.glob("*.tar")) or list(place.glob("*.zip"))
        files = sorted(inside, key=lambda file: natural(file.name))
    else:
        files = [place]
    # Of many in a bucket one listing finds out, see `find_records`.
    few = files if not places.in_bucket(place) or len(files) == 1 else []
    missing = [str(file) for file in few if not file.exists()]
    if missing or not files:
        absent = missing[0] if missing else path
        raise ConfigError(f"there is no tar file {absent}{places.nearest_existing(absent)}")
    return files


def _check_masks(masks: tuple[str, int, str, str], mask_files: str) -> None:
    """Raises `ConfigError`, a question, unless images that are named like masks are to be kept."""
    where, count, mask, image = masks
    if mask_files != "keep":
        raise ConfigError(
            f"{where}: {count:,} images are {MASKS}, the first is {readable(mask)} beside {readable(image)}. Set "
            "--config.data.mask_files=keep if they are examples; if they are none, make the archive without them"
        )


def archive_kind(files: Sequence[epath.Path]) -> Kind:
    """Whether files are tar or zip files, by the name of the first."""
    return zip_index.KIND if files[0].suffix.lower() == zip_index.SUFFIX else tar_index.KIND


@dataclasses.dataclass(frozen=True)
class _Meaning:
    """What codes stand for, and tar files where a code says nothing.

    Attributes:
      labels, file_labels: per code and per tar file a class, a tuple of classes, or `None`.
      splits, file_splits: the names of splits, '' for none.
      spelled: name of a folder → split.
      labels_from: see `summary.Summary`.
      named_by_folders: whether classes are called as folders.
    """

    classes: tuple[str, ...]
    multi_label: bool
    labels: list[Label]
    file_labels: list[Label]
    splits: list[str]
    file_splits: list[str]
    spelled: Mapping[str, str]
    labels_from: str
    named_by_folders: bool


def _understand(tars: TarIndex, files: list, config_data: Data) -> _Meaning:
    """Which class and split each code and each tar file stands for.

    Raises:
      ConfigError: see `table.number_labels`.
    """
    texts = [text for text, _, _ in tars.table]
    folders = [folder for _, folder, _ in tars.table]
    stems = [file.stem if re.fullmatch(r"n\d{8}", file.stem) else None for file in files]
    codes, by_file = tars.occurring()
    labels = [texts[code] for code in codes] + [stems[number] for number in by_file]
    are_beside = any(tars.table[code][2] for code in codes)
    with_splits = config_data.layout != "classes"
    names = {*labels} - {None}
    flat = find_splits(names) if with_splits and not are_beside else {}
    around = {folders[code] for code in codes}
    are_flat = len(flat) == len(names)
    if are_flat and has_both_sides(flat.values()) and "" not in around and len(around) > 1:
        # The folders of classes hold the folders of splits.
        of_splits = texts
        texts = folders
        folders = of_splits
        labels = [texts[code] for code in codes] + [None] * len(by_file)
    elif are_flat:  # the only folders are splits
        folders = [text or folder for text, folder in zip(texts, folders, strict=True)]
        labels = [None] * len(labels)
    spelled = find_splits({folders[code] for code in codes} - {""}) if with_splits else {}

    def where(i: int) -> str:
        row = tars.find(codes[i]) if i < len(codes) else tars.find(None, by_file[i - len(codes)])
        number, name, _, _ = tars.place(row)
        return f"{tars.files[number]}, {readable(name)}"

    names_file = files[0].parent / "classes.txt"
    classes, multi_label, numbered = number_labels(labels, names_file, where)
    of_code = dict(zip(codes, numbered, strict=False))
    of_file = dict(zip(by_file, numbered[len(codes) :], strict=True))
    file_splits = (
        splits_of_files([file.name for file in files]) if with_splits else [""] * len(files)
    )
    inside = "the folders in tar files" if codes else "the names of tar files"
    return _Meaning(
        classes,
        multi_label,
        [of_code.get(code) for code in range(len(texts))],
        [of_file.get(number) for number in range(len(files))],
        [spelled.get(folder, "") for folder in folders],
        file_splits,
        spelled,
        "files beside the images (.cls, .json)" if are_beside else inside,
        bool(codes) and not are_beside and not names_file.exists(),
    )
