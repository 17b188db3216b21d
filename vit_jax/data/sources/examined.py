"""What is in image files on a disk, found by reading each of them once, before the first step: which cannot be read,
and which are copies of others, byte for byte. It is kept beside the files, or for small sets found out again at each
start; see `stored_index.py`.
"""

import collections
import dataclasses
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from absl import logging

from vit_jax.base import places
from vit_jax.data.decoding import images
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, Label
from vit_jax.data.sources.columns import FileColumns
from vit_jax.data.sources.stored_index import Kind, find_records
from vit_jax.data.sources.text import readable

_LISTED = 10  # files in a message


@dataclasses.dataclass(frozen=True)
class Examined:
    """What was found in files.

    Attributes:
      marks: path → a hash of the file's bytes, below 2**64, where they may be decoded. Copies have the same.
      problems: path → why the file cannot be read.
    """

    marks: Mapping[str, int]
    problems: Mapping[str, str]

    def marks_of(self, paths: Iterable[str]) -> np.ndarray:
        """The marks of files, (n,) uint64; 0 where one cannot be read."""
        return np.asarray([self.marks.get(path, 0) for path in paths], np.uint64)


def examine(root: str, paths: Sequence[str], config_data: Data) -> Examined | None:
    """Reads image files, if `config_data.examine` says so and they are on a disk; else `None`.

    Args:
      root: the folder that `paths` are relative to.
      paths: of the files; some may not be there.
    """
    if not config_data.examine:
        return None
    if places.in_bucket(root) or any(map(places.in_bucket, paths)):
        _say(f"{root}: images in a bucket are not read before the first step, and copies not found")
        return None
    files = {path: os.path.join(root, path) for path in paths}
    present = [file for file in files.values() if os.path.isfile(file)]
    index = find_records(present, _kind(), folder=root) if present else None
    marks, problems, on_disk = {}, {}, set(present)
    for path, file in files.items():
        if file in on_disk:
            number = index.number(file)
            why = index.notes[number] or _too_large(index.column("sides", number), config_data)
        else:
            why = _read(places.File(file, 0, "")).note
        if why:
            problems[path] = why
        else:
            marks[path] = int(index.column("mark", number)[0])
    return Examined(marks, problems)


def _kind() -> Kind:
    # What can be read depends on it.
    heic = "with" if importlib.util.find_spec("pillow_heif") else "without"
    return Kind(f"images 1, {heic} HEIC", _read, doing="reading")


def _read(file: places.File) -> FileColumns:
    """A file's mark and (height, width), or as a note why it is none that may be decoded."""
    try:
        image = images.read_file(file.path)
        head = images.check_image(image, file.path, sys.maxsize)
    except BadImage as error:
        return FileColumns(
            {"mark": np.zeros(1, "<u8"), "sides": np.zeros(2, "<u8")}, note=error.why
        )
    mark = int.from_bytes(hashlib.blake2b(image, digest_size=8).digest(), "big")
    sides = head.height, head.width
    return FileColumns({"mark": np.asarray([mark], "<u8"), "sides": np.asarray(sides, "<u8")})


def _too_large(sides: np.ndarray, config_data: Data) -> str:
    """Why an image of these (height, width) is not read; '' if it is."""
    try:
        images.check_pixels(*map(int, sides), "", config_data.max_pixels)
    except BadImage as error:
        return error.why
    return ""


@dataclasses.dataclass(frozen=True)
class Findings:
    """What is wrong with the images of a data set.

    Attributes:
      images: how many there are, readable or not.
      problems: path → why the file cannot be read.
      copies: groups of (path, label) whose files are the same byte for byte, each of two at least.
      conflicting: those of `copies` that have several labels.
      leaks: split → (path, path of the training image) of its images that are training images, too.
    """

    images: int
    problems: Mapping[str, str]
    copies: Sequence[Sequence[tuple[str, Label]]]
    conflicting: Sequence[Sequence[tuple[str, Label]]]
    leaks: Mapping[str, Sequence[tuple[str, str]]]

    @property
    def copied(self) -> int:
        """How many images are copies of others."""
        return sum(map(len, self.copies)) - len(self.copies)


def find_problems(
    examined: Examined, splits: Mapping[str, Sequence[tuple[str, Label]]]
) -> Findings:
    """What is wrong with the images of a data set.

    Args:
      splits: per split the (path, label) of its examples.
    """
    marks = examined.marks
    by_mark = collections.defaultdict(list)
    for path, label in (row for rows in splits.values() for row in rows):
        if path in marks:
            by_mark[marks[path]].append((path, label))
    copies = [group for group in by_mark.values() if len(group) > 1]
    trained = {marks[path]: path for path, _ in splits.get("train", ()) if path in marks}
    leaks = {
        name: [(path, trained[marks[path]]) for path, _ in rows if marks.get(path) in trained]
        for name, rows in splits.items()
        if name != "train"
    }
    return Findings(
        sum(map(len, splits.values())),
        examined.problems,
        copies,
        [group for group in copies if len({label for _, label in group}) > 1],
        leaks,
    )


def report(
    where: str,
    examined: Examined,
    splits: Mapping[str, Sequence[tuple[str, Label]]],
    classes: Sequence[str],
) -> None:
    """Logs what is wrong with the images of a data set, once a process.

    Args:
      where: the data set.
      splits: per split the (path, label) of its examples.
      classes: the label names.
    """
    findings = find_problems(examined, splits)
    if findings.problems:
        why = [f"{readable(path)}: {why}" for path, why in findings.problems.items()]
        count = findings.images
        _warn(f"{where}: {len(why):,} of {count:,} images cannot be read: {_some(why)}")
    if findings.copies:
        some = _some([_equal(group) for group in findings.copies])
        _warn(f"{where}: {findings.copied:,} images are copies of others, byte for byte: {some}")
    if findings.conflicting:
        count = sum(map(len, findings.conflicting))
        some = _some(conflicts(findings, classes))
        _warn(
            f"{where}: {count:,} images, of which {len(findings.conflicting):,} differ, have several labels, one for "
            f"each copy, and at most one is right: {some}. Remove the wrong copies"
        )
    for name, pairs in findings.leaks.items():
        if pairs:
            some = _some([f"{readable(path)} = {readable(trained)}" for path, trained in pairs])
            _warn(
                f"{where}: {len(pairs):,} of {len(splits[name]):,} images of {name!r} are copies of training images, "
                f"so that accuracy on them says nothing of new ones: {some}. Remove them from one side"
            )


def report_empty(where: str, folders: Sequence[str]) -> None:
    """Logs, once a process, which folders of classes have no images."""
    _warn(
        f"{where}: {len(folders):,} folders have no images and are no classes: {_some(folders)}. Remove them, or put "
        "images into them before a run starts: its classes stay"
    )


def conflicts(findings: Findings, classes: Sequence[str]) -> list[str]:
    """'a/1.jpg (cat) = b/1.jpg (dog)' of each image that has several labels."""
    return [_equal(group, classes) for group in findings.conflicting]


def _equal(group: Sequence[tuple[str, Label]], classes: Sequence[str] = ()) -> str:
    """'a/1.jpg = a/2.jpg', with the names of their classes, if these are given."""
    named = (f" ({_named(label, classes)})" if classes else "" for _, label in group)
    return " = ".join(readable(path) + name for (path, _), name in zip(group, named, strict=True))


def _named(label: Label, classes: Sequence[str]) -> str:
    labels = label if isinstance(label, tuple) else (label,)
    return ", ".join(classes[number] for number in labels)


def _some(texts: Sequence[str]) -> str:
    return "; ".join([*texts[:_LISTED], *(["…"] if len(texts) > _LISTED else [])])


@functools.cache  # A run opens its data once to train and once to evaluate.
def _warn(text: str) -> None:
    logging.warning("%s", text)


@functools.cache
def _say(text: str) -> None:
    logging.info("%s", text)
