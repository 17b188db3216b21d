"""What is in a folder of labelled photos, found before anything is trained: how many of each class, on which side, and
what is wrong with them.
"""

import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Sequence

from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.record import Label, Source
from vit_jax.data.sources import examined, folder
from vit_jax.data.sources.layouts import read_layout
from vit_jax.data.sources.metadata import find_metadata
from vit_jax.data.sources.parquet import find_parquet
from vit_jax.data.sources.table import label_at
from vit_jax.data.sources.text import readable
from vit_jax.data.sources.trees import tree_at
from vit_jax.pictures.page import Page
from vit_jax.studies.labelling import ONE_LABEL, Labelling, labelling_of

TINY = 10  # a class of fewer images is reported
_SHOWN = 30  # lines of a table of the page


@dataclasses.dataclass(frozen=True)
class Photos:
    """A set of labelled photos.

    Attributes:
      data: that section of the config, with the name and path of the set.
      train, test: the images to learn from, and those that are held out.
      counts: class → its images to learn from and held out that can be read.
      unlabelled: images to learn from and held out that have no label, where images may have several; they are of none
        of the classes.
      findings: what is wrong with the images; `None` where files are not examined: in archives and buckets.
      empty: folders of classes that have no images.
      others: files that are no images, by what is known of them: (name, why).
      hidden: how many files have names that begin with a dot, such as AppleDouble's.
    """

    data: Data
    train: Source
    test: Source
    counts: dict[str, tuple[int, int]]
    unlabelled: tuple[int, int]
    findings: examined.Findings | None
    empty: Sequence[str]
    others: Sequence[tuple[str, str]]
    hidden: int

    @property
    def classes(self) -> tuple[str, ...]:
        """The label names."""
        return self.train.classes

    @property
    def labelling(self) -> Labelling:
        """Whether images have one label each, or several."""
        return labelling_of(self.train)

    @property
    def tiny(self) -> dict[str, int]:
        """The classes of fewer than `TINY` images, the smallest first."""
        sizes = {name: sum(both) for name, both in self.counts.items()}
        return {n: sizes[n] for n in sorted(sizes, key=sizes.get) if sizes[n] < TINY}

    def describe(self) -> dict:
        """As JSON: counts and lists of all that was found."""
        description = {
            "photos": self.data.path,
            "classes": {name: list(both) for name, both in self.counts.items()},
            "train": len(self.train),
            "test": len(self.test),
            "unlabelled": list(self.unlabelled),
            "tiny_classes": self.tiny,
            "empty_classes": list(self.empty),
            "no_images": [list(pair) for pair in self.others],
            "hidden_files": self.hidden,
        }
        if self.findings is None:
            return description
        names = [[readable(path) for path, _ in group] for group in self.findings.copies]
        across = {name: list(map(list, pairs)) for name, pairs in self.findings.leaks.items()}
        return description | {
            "unreadable": {readable(p): why for p, why in self.findings.problems.items()},
            "copies": names,
            "copied": self.findings.copied,
            "conflicting_labels": examined.conflicts(self.findings, self.classes),
            "copies_across_sides": across,
        }

    def lines(self) -> list[str]:
        """What was found, each in a line with its number."""
        findings, tiny = self.findings, self.tiny
        lines = [
            f"{len(self.train) + len(self.test):,} images of {len(self.classes):,} classes: {len(self.train):,} to "
            f"learn from, {len(self.test):,} held out to measure accuracy"
        ]
        if any(self.unlabelled):
            lines.append(
                f"images without any label, which are of none of the classes: {self.unlabelled[0]:,} to learn from, "
                f"{self.unlabelled[1]:,} held out"
            )
        numbers = {}
        if findings is None:
            lines.append("files and copies are not examined: the images are not files on a disk")
        else:
            heic = [path for path in findings.problems if path.lower().endswith((".heic", ".heif"))]
            numbers |= {
                "images that cannot be read, and are passed over": findings.problems,
                "of these HEIC": heic,
                "images whose copies have other labels": findings.conflicting,
            }
            across = sum(map(len, findings.leaks.values()))
            lines.append(
                f"copies of others, byte for byte: {findings.copied:,}; held-out images that are copies of images to "
                f"learn from: {across:,}"
            )
        numbers |= {
            f"classes with fewer than {TINY} images": tiny,
            "folders without images, which are no classes": self.empty,
            "files that are no images": [name for name, _ in self.others],
        }
        for what, entries in numbers.items():
            if entries:
                lines.append(f"{what}: {len(entries):,}{_named(entries)}")
        if self.hidden:
            lines.append(f"hidden files, such as a Mac's ._IMG.jpg: {self.hidden:,}")
        return lines

    def add_to_page(self, page: Page) -> None:
        """Appends what was found to a page."""
        page.heading("The photos")
        for line in self.lines():
            page.text(line[0].upper() + line[1:] + ".")
        rows = [[name, f"{a:,}", f"{b:,}"] for name, (a, b) in self.counts.items()]
        rows.sort(key=lambda row: -int(row[1].replace(",", "")))
        _add_table(page, "Images of each class", ["class", "to learn from", "held out"], rows)
        if self.findings:
            problems = [[readable(path), why] for path, why in self.findings.problems.items()]
            conflicts = [[text] for text in examined.conflicts(self.findings, self.classes)]
            copies = [
                [" = ".join(readable(path) for path, _ in group)] for group in self.findings.copies
            ]
            _add_table(page, "Files that cannot be read", ["file", "why"], problems)
            _add_table(page, "Copies with other labels", ["file (class)"], conflicts)
            _add_table(page, "Copies", ["files that are the same"], copies)


def find_labelling(path: epath.PathLike, data: Data) -> Labelling:
    """Whether the images of a set have one label each, or several. It decides how images are held out, without which
    the set cannot be opened as `look` does.

    Args:
      path, data: see `look`.

    Raises:
      ConfigError: there is no such folder, or the images have no labels.
    """
    data = sources.locate(os.fspath(path), data, "PHOTOS")
    try:
        by_name = dataclasses.replace(data, holdout_by="file", examine=False)
        source = sources.open_data_set(by_name, is_logged=False).open(data.train_split)
    except ConfigError:  # Such as one about an empty folder: `look` raises it again.
        return ONE_LABEL
    if not source.classes:
        raise ConfigError(
            f"{path}: the images have no labels, and classify expects some: put the images of each class into a folder "
            "of its name, or write a CSV file of path,label"
        )
    return labelling_of(source)


def look(path: epath.PathLike, data: Data) -> Photos:
    """Reads all files of a set once, if they are on a disk, and says what is in it.

    Args:
      path: a folder of class folders, a list of files with labels, or what `vit_jax prepare` makes.
      data: that section of the config, without the name and path of the set.

    Raises:
      ConfigError: there is no such folder, no image can be held out or read, or all images are of one class.
    """
    data = sources.locate(os.fspath(path), data, "PHOTOS")
    data_set = sources.open_data_set(data)
    if data_set.sizes.get(data.eval_split) == 0:
        raise ConfigError(
            f"{path}: no image can be held out to measure accuracy: a class needs two images, better ten"
        )
    train, test = data_set.open(data.train_split), data_set.open(data.eval_split)
    counts = {name: [0, 0] for name in train.classes}
    unlabelled = [0, 0]
    for side, source in enumerate((train, test)):
        for label in _readable_labels(source):
            numbers = label if isinstance(label, tuple) else (label,)
            unlabelled[side] += not numbers
            for number in numbers:
                counts[source.classes[number]][side] += 1
    if len(train.classes) < 2 and not any(unlabelled):
        raise ConfigError(f"{path}: all images are of one class, {train.classes[0]!r}: add another")
    if not any(map(sum, counts.values())):
        why = next(iter(getattr(train, "problems", {}).values()), "")
        raise ConfigError(f"{path}: none of the {len(train):,} images can be read: {why}")
    for side, purpose in enumerate(("to learn from", "held out to measure accuracy")):
        if not any(both[side] for both in counts.values()):
            raise ConfigError(
                f"{path}: no image that is {purpose} has a label and can be read: add images, or a column 'split' to "
                "the list"
            )
    is_folder = data.name == "folder" and os.path.isdir(data.path)
    return Photos(
        data,
        train,
        test,
        {name: tuple(both) for name, both in counts.items()},
        tuple(unlabelled),
        _findings(train, test),
        _empty(data, train.classes) if is_folder else (),
        folder.unread_files(epath.Path(data.path), data) if is_folder else (),
        _hidden(data.path) if is_folder else 0,
    )


def _readable_labels(source: Source) -> Iterator[Label]:
    """The labels of the images that can be read, as far as that is known."""
    if source.labels is None:  # in the records
        yield from (source[index].label for index in range(len(source)))
        return
    marks = getattr(source, "marks", None)
    for index in range(len(source)):
        if marks is None or marks[index]:
            yield label_at(source.labels, index)


def _findings(train: Source, test: Source) -> examined.Findings | None:
    marks, problems, splits = {}, {}, {}
    for name, source in (("train", train), ("test", test)):
        if getattr(source, "marks", None) is None:
            return None
        splits[name] = [(p, label_at(source.labels, i)) for i, p in enumerate(source.paths)]
        by_path = zip(source.paths, source.marks.tolist(), strict=True)
        marks |= {path: mark for path, mark in by_path if mark}
        problems |= source.problems
    return examined.find_problems(examined.Examined(marks, problems), splits)


def _empty(data: Data, classes: Sequence[str]) -> list[str]:
    """The folders of classes that are no classes."""
    tree = tree_at(epath.Path(data.path))
    if find_metadata(tree) or find_parquet(tree):
        return []
    layout = read_layout(tree, data.layout)
    names = next(iter(layout.classes.values()))
    return [readable(name) for name in names if readable(name) not in classes]


def _hidden(root: str) -> int:
    names = (name for _, _, files in os.walk(root) for name in files)
    return sum(name.startswith(".") for name in names)


def _named(entries: Iterable, most: int = 5) -> str:
    """' (a, b, …)' of names; '' of what has none."""
    names = [readable(entry) for entry in entries if isinstance(entry, str)]
    return f" ({', '.join(names[:most])}{', …' if len(names) > most else ''})" if names else ""


def _add_table(page: Page, title: str, header: list[str], rows: list[list[str]]) -> None:
    if not rows:
        return
    page.text(f"{title}:")
    page.table([header, *rows[:_SHOWN]])
    if len(rows) > _SHOWN:
        page.text(f"… and {len(rows) - _SHOWN:,} more, in photos.json.")


def write(photos: Photos, path: epath.Path) -> None:
    """Writes what was found as JSON."""
    places.write_whole(path, json.dumps(photos.describe(), indent=1, ensure_ascii=False) + "\n")
