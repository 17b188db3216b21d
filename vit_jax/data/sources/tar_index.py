"""Where the images in tar files are, and what says their labels and splits: from the headers of the files, or from
the stored index of them.

The columns of a tar file: of each image its first byte, its bytes, its name (all names one after the other, and where
each ends), the hash of its name that decides whether it is held out, and a code for (label, the folder that may be that
of a split, whether the label is in a file beside it); a label of None is that of the tar file. Where the innermost
folder, which is the label, is called like a split, the other one is the folder around it, which may be the class.
"""

import bisect
import json
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.record import Label, Labels
from vit_jax.data.sources.beside import ARRAYS, MASKS, find_masks, is_array
from vit_jax.data.sources.columns import FileColumns, Index, smallest
from vit_jax.data.sources.listed import json_label
from vit_jax.data.sources.ranges import open_to_scan
from vit_jax.data.sources.split_names import first_split_name, has_split_word
from vit_jax.data.sources.stored_index import Kind, find_records
from vit_jax.data.sources.table import name_number
from vit_jax.data.sources.tar_labels import LabelsBeside, arrays_beside
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.trees import is_hidden
from vit_jax.data.sources.unused import HIDDEN, Unused

_OF_FILE = (None, "", False)  # the row of the table whose images are labelled by their tar file
_RELEASE = 64  # files, or images far apart, after which the memory of what was looked at is let go

INFLATED = "inflated"  # the column of the sizes of compressed members; a tar file has none

Place = tuple[int, str, int, int]  # number of the tar file, name inside, first byte, bytes
_Sample = tuple[
    str, int, int, str | tuple[str, ...] | None
]  # name, first byte, bytes, label beside


class TarIndex:
    """The images in tar files, numbered from the first of the first file on.

    Attributes:
      files: paths of the tar files.
      table: per code (label, the folder that may be that of a split or '', whether the label is in a file beside the
        image).
    """

    def __init__(self, files: Sequence[str], kind: Kind):
        """`kind`: of the archives, `KIND` or that of zip files."""
        self.files = tuple(files)
        self._index = find_records(files, kind)
        self.table = self._index.table
        self._numbers = [self._index.number(path) for path in files]
        counts = [self._index.count("first", number) for number in self._numbers]
        self._ends = np.cumsum(counts).tolist()
        self._of_file = next((i for i, row in enumerate(self.table) if row == _OF_FILE), -1)

    def __len__(self) -> int:
        return self._ends[-1]

    def unused(self) -> list[dict]:
        """What each file has besides images, see `Unused.counts`."""
        notes = [self._index.notes[number] for number in self._numbers]
        return [{why: note[why] for why in note if why != MASKS} for note in notes]

    def masks(self) -> list[tuple[str, int, str, str]]:
        """(archive, how many, the first, the image beside it) of the images that are named like masks of others."""
        notes = [self._index.notes[number] for number in self._numbers]
        pairs = zip(self.files, notes, strict=True)
        return [(path, *note[MASKS]) for path, note in pairs if MASKS in note]

    def place(self, row: int) -> Place:
        """Where an image is."""
        file = bisect.bisect_right(self._ends, row)
        row -= self._begin(file)
        ends = self._column("name_end", file)
        name = self._column("name", file)[int(ends[row - 1]) if row else 0 : int(ends[row])]
        first, size = self._column("first", file)[row], self._column("size", file)[row]
        return file, _decode(name.tobytes()), int(first), int(size)

    def inflated(self, row: int) -> int:
        """How many bytes an image has, if it is compressed in the archive; else 0."""
        file = bisect.bisect_right(self._ends, row)
        if not self._index.has_column(INFLATED, self._numbers[file]):
            return 0
        return int(self._column(INFLATED, file)[row - self._begin(file)])

    def sample(self, rows: Iterable[int]) -> list[Place]:
        """Where a few images are that lie far apart; what was looked at takes no memory afterwards."""
        sampled = []
        for row in rows:
            sampled.append(self.place(row))
            if len(sampled) % _RELEASE == 0:
                self._index.release()
        return sampled

    def occurring(self) -> tuple[list[int], list[int]]:
        """The codes that occur, and the files that label some of their images."""
        seen, files = np.zeros(len(self.table), bool), []
        for file in self._files():
            codes = self._column("code", file)
            seen[codes] = True
            if self._of_file >= 0 and (codes == self._of_file).any():
                files.append(file)
        return [code for code in np.flatnonzero(seen).tolist() if code != self._of_file], files

    def find(self, code: int | None, file: int = 0) -> int:
        """The first image with a code, of `file` or later; None: the code that says that its file labels it."""
        wanted = self._of_file if code is None else code
        for number in range(file, len(self.files)):
            if len(rows := np.flatnonzero(self._column("code", number) == wanted)):
                return self._begin(number) + int(rows[0])
        raise ValueError(f"no image has the code {code}")

    def rows_by_split(
        self, splits: Sequence[str], file_splits: Sequence[str]
    ) -> dict[str, range | np.ndarray]:
        """The images of each split, in the order in which splits occur.

        Args:
          splits: of each code.
          file_splits: of each file, for images whose code has none.
        """
        names = list(dict.fromkeys(["", *splits, *file_splits]))
        known = {name: number for number, name in enumerate(names)}
        of_code = np.asarray([known[split] for split in splits], np.int8)
        of_file = [known[split] for split in file_splits]

        def numbers(file: int) -> int | np.ndarray:
            if not of_code.any():
                return of_file[file]
            split_numbers = of_code[self._column("code", file)]
            return np.where(split_numbers == 0, np.int8(of_file[file]), split_numbers)

        rows = self._rows_by(numbers, len(names))
        return {names[number]: rows[number] for number in rows if len(rows[number])}

    def held_out(
        self, hold_out: Callable[[np.ndarray, range], np.ndarray], *, at_once: bool
    ) -> dict[str, range | np.ndarray]:
        """All images as 'train' and 'test'.

        Args:
          hold_out: (hashes of names, these images) -> which of these are 'test', (n,) bool.
          at_once: whether it has to see all images together.
        """
        if at_once:
            hashes = [self._column("hash", file) for file in range(len(self.files))]
            out = hold_out(np.concatenate(hashes), range(len(self)))

        def numbers(file: int) -> np.ndarray:
            rows = range(self._begin(file), self._ends[file])
            mask = (
                out[rows.start : rows.stop]
                if at_once
                else hold_out(self._column("hash", file), rows)
            )
            return mask.astype(np.int8)

        rows = self._rows_by(numbers, 2)
        return {"train": rows.get(0, range(0)), "test": rows.get(1, range(0))}

    def labels(
        self, rows: range | np.ndarray, of_code: Sequence[Label], of_file: Sequence[Label]
    ) -> Labels:
        """The labels of images whose numbers rise: (n,) int32, or a tuple of classes for each.

        Args:
          of_code: the label of each code.
          of_file: of each file, for images whose code has none.
        """
        if any(isinstance(label, tuple) for label in (*of_code, *of_file)):
            return tuple(
                of_file[file] if code == self._of_file else of_code[code]
                for file, part in self._parts(rows)
                for code in self._column("code", file)[part].tolist()
            )
        labels, done = np.empty(len(rows), np.int32), 0
        table = np.asarray([-1 if label is None else label for label in of_code], np.int32)
        for file, part in self._parts(rows):
            codes = self._column("code", file)[part]
            if self._of_file >= 0:
                table[self._of_file] = -1 if of_file[file] is None else of_file[file]
            np.take(table, codes, out=labels[done : done + len(codes)])
            done += len(codes)
        return labels

    def places(self, rows: range | np.ndarray) -> Iterator[Place]:
        """Where images are whose numbers rise."""
        for file, part in self._parts(rows):
            names, ends = self._column("name", file).tobytes(), self._column("name_end", file)
            begins = np.append(0, ends[:-1])
            columns = (begins, ends, self._column("first", file), self._column("size", file))
            for begin, end, first, size in zip(*(c[part].tolist() for c in columns), strict=True):
                yield file, _decode(names[begin:end]), first, size

    def _column(self, name: str, file: int) -> np.ndarray:
        return self._index.column(name, self._numbers[file])

    def _begin(self, file: int) -> int:
        return self._ends[file - 1] if file else 0

    def _files(self) -> Iterator[int]:
        """The numbers of all files; what was looked at of earlier ones takes no memory."""
        for file in range(len(self.files)):
            yield file
            if file % _RELEASE == _RELEASE - 1:
                self._index.release()

    def _parts(self, rows: range | np.ndarray) -> Iterator[tuple[int, slice | np.ndarray]]:
        """(file, which of its images) of images whose numbers rise."""
        borders = [0, *self._ends]
        if isinstance(rows, range):
            places = [min(max(border - rows.start, 0), len(rows)) for border in borders]
        else:
            places = np.searchsorted(rows, np.asarray(borders, rows.dtype)).tolist()
        for file in self._files():
            first, last = places[file], places[file + 1]
            if first < last and isinstance(rows, range):
                start = rows.start + first - self._begin(file)
                yield file, slice(start, start + last - first)
            elif first < last:
                yield file, rows[first:last].astype(np.int64) - self._begin(file)

    def _rows_by(
        self, numbers: Callable[[int], int | np.ndarray], most: int
    ) -> Mapping[int, range | np.ndarray]:
        """The images that have each number below `most`, by the number, in the order in which these occur.

        Args:
          numbers: of the images of a file: one for all, or one each.
        """
        counts: dict[int, int] = {}
        for file in self._files():
            file_numbers, size = numbers(file), self._ends[file] - self._begin(file)
            if isinstance(file_numbers, int):
                of_file = {file_numbers: size}
            else:
                of_file = dict(enumerate(np.bincount(file_numbers, minlength=most).tolist()))
            new = [n for n, count in of_file.items() if count and n not in counts]
            if len(new) > 1:
                new.sort(key=lambda n, file_numbers=file_numbers: np.argmax(file_numbers == n))
            counts |= dict.fromkeys(new, 0)
            counts |= {n: counts[n] + count for n, count in of_file.items() if count}
        if len(counts) == 1:
            return {number: range(len(self)) for number in counts}
        dtype = np.uint32 if len(self) < 2**32 else np.int64
        rows = {number: np.empty(count, dtype) for number, count in counts.items()}
        done = dict.fromkeys(counts, 0)
        for file in self._files():
            file_numbers, begin = numbers(file), self._begin(file)
            for number in [file_numbers] if isinstance(file_numbers, int) else counts:
                if isinstance(file_numbers, int):
                    own = np.arange(begin, self._ends[file])
                else:
                    own = np.flatnonzero(file_numbers == number) + begin
                rows[number][done[number] : done[number] + len(own)] = own
                done[number] += len(own)
        return rows


def count_images(index: Index, path: str) -> int:
    """How many images a tar file has."""
    return index.count("first", index.number(path))


def _scan(file: places.File) -> FileColumns:
    """The columns of the images in a tar file; the note is what else it has, see `Unused.counts`."""
    try:
        with open_to_scan(file) as opened, tarfile.open(fileobj=opened, mode="r:") as tar:
            members = (
                Member(
                    member.name, member.offset_data, member.size, 0, tar.extractfile(member).read
                )
                for member in tar
                if member.isfile()
            )
            return describe_members(file.path, members)
    except ConfigError:
        raise
    except (tarfile.TarError, ValueError, AttributeError) as error:
        raise ConfigError(
            f"{file.path} cannot be read as an uncompressed tar file: {error!r}"
        ) from None


class Member(NamedTuple):
    """A file inside an archive.

    Attributes:
      name: with its folders.
      first, size: where its bytes are in the archive.
      inflated: how many bytes it has, if it is compressed; else 0.
      read: gives them.
    """

    name: str
    first: int
    size: int
    inflated: int
    read: Callable[[], bytes]


def describe_members(path: str, members: Iterable[Member]) -> FileColumns:
    """The columns of the images among the members of an archive; the note is what else it has, see `Unused.counts`.

    Raises:
      ConfigError: see `tar_labels.LabelsBeside`.
      ValueError, AttributeError: a label cannot be read.
    """
    unused = Unused()
    labels = LabelsBeside(path)
    images = []
    for member in members:
        suffix = os.path.splitext(member.name)[1].lower()
        if any(map(is_hidden, _parts_of(member.name))):
            unused.skip(HIDDEN, [member.name])
        elif suffix == ".cls":
            labels.add(member.name, member.read().decode().strip())
        elif suffix == ".json":
            label = _label_in_json(path, member)
            if label is not None:
                labels.add(member.name, label)
        elif unused.is_image(member.name):
            images.append(member)
    arrays = [member.name for member in images if is_array(member.name)]
    pictures = (member.name for member in images if not is_array(member.name))
    skipped = arrays_beside(arrays, pictures) if arrays else set()
    unused.skip(ARRAYS, skipped)
    examples = [member for member in images if member.name not in skipped]
    samples = [(m.name, m.first, m.size, labels.label_of(m.name)) for m in examples]
    note = unused.counts()
    if masks := find_masks(member.name for member in examples):
        note[MASKS] = [len(masks), *next(iter(masks.items()))]
    described = _columns(samples, note)
    inflated = np.asarray([member.inflated for member in examples], np.int64)
    if inflated.any():
        columns = {**described.columns, INFLATED: smallest(inflated)}
        return FileColumns(columns, described.table, described.note)
    return described


def _label_in_json(path: str, member: Member) -> str | tuple[str, ...] | None:
    """The label in a member that is a JSON object.

    Raises:
      ConfigError: it is damaged, or its label is nested.
    """
    try:
        return json_label(json.loads(member.read()))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{path} cannot be read: {readable(member.name)}: {error}") from None


def _parts_of(name: str) -> list[str]:
    """The folders of a member and its own name, without '.', as in './a/b.jpg'."""
    return [part for part in name.split("/") if part not in ("", ".", "..")]


def _columns(samples: Sequence[_Sample], unused: dict) -> FileColumns:
    names = [name.encode("utf-8", "surrogateescape") for name, *_ in samples]
    table: dict[tuple, int] = {}
    codes = [table.setdefault(_row(name, label), len(table)) for name, _, _, label in samples]
    columns = {
        "first": smallest(np.asarray([first for _, first, _, _ in samples], np.int64)),
        "size": smallest(np.asarray([size for _, _, size, _ in samples], np.int64)),
        "name": np.frombuffer(b"".join(names), np.uint8),
        "name_end": smallest(np.cumsum([len(name) for name in names], dtype=np.int64)),
        "hash": np.asarray([name_number(name) for name, *_ in samples], "<u8"),
        "code": np.asarray(codes, "<u4"),
    }
    return FileColumns(columns, list(table), unused)


def _row(name: str, label: str | tuple[str, ...] | None) -> tuple:
    """A row of `TarIndex.table`, for an image; see `tar.py`."""
    folders = _parts_of(os.path.dirname(name))
    if label is not None:
        return label, first_split_name(folders), True
    if not folders:
        return _OF_FILE
    *outer, inner = folders
    split = first_split_name(outer)
    if not split and outer and has_split_word(inner):  # the folder of a split inside of a class?
        split = outer[-1]
    return readable(inner), split, False


def _decode(name: bytes) -> str:
    return name.decode("utf-8", "surrogateescape")


KIND = Kind("tar 4", _scan)
