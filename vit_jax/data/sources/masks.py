"""Images with masks for segmentation, as files:

  PATH/images/NAME.jpg   an image in any readable format, at any depth
  PATH/masks/NAME.png    its mask, of the same name and size
  PATH/classes.csv       which values or colours stand for which class, see `read_table`
  PATH/masks.json        instead of that table: segments of panoptic masks, see `panoptic`

Where all images lie in folders `train`, `test`, `val` or `validation` of `images`, these are the splits;
else the share `config.data.holdout` becomes 'test'.
"""

import csv
import dataclasses
import io
import os
from collections.abc import Sequence

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.data.labels.masks import COLOR, IGNORED, MAX_CLASSES, VALUE, ClassTable
from vit_jax.data.options import Data
from vit_jax.data.record import BadImage, DataAbsent, DataSet, Record
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.panoptic import Segments, read_panoptic
from vit_jax.data.sources.ranges import read_files
from vit_jax.data.sources.split_names import find_splits
from vit_jax.data.sources.table import Table, hold_out
from vit_jax.data.sources.text import read_text, readable
from vit_jax.data.sources.trees import Tree, tree_at
from vit_jax.data.sources.unused import Unused

IMAGES, MASKS, TABLE = "images", "masks", "classes.csv"


@dataclasses.dataclass(frozen=True)
class MaskedImages:
    """Image files with masks.

    Attributes:
      root: the folder that `pairs` are relative to; local, or gs://.
      masks: what the values of masks mean.
      pairs: (image, mask) files, in the order of the indices.
      segments: of panoptic masks.
      contents: (n, 2) uint64, of a folder in a bucket: see `trees.Tree.contents`.
    """

    root: str
    masks: ClassTable
    pairs: tuple[tuple[str, str], ...]
    multi_label: bool = False
    labels: None = None
    segments: Segments | None = None
    contents: np.ndarray | None = None

    @property
    def classes(self) -> tuple[str, ...]:
        """Of the pixels."""
        return self.masks.classes

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order. The label of one is its encoded mask, with its segments if it is
        panoptic.
        """
        paths = [os.path.join(self.root, name) for i in indices for name in self.pairs[i]]
        contents = iter(read_files(paths))
        records = []
        for name, mask_file in (self.pairs[i] for i in indices):
            image, mask = _good(next(contents)), _good(next(contents))
            label = mask if self.segments is None else (mask, self.segments[mask_file])
            records.append(Record(image, label, readable(os.path.join(self.root, name))))
        return records

    def identity(self, index: int) -> tuple | None:
        """Names, contents and segments, which differ once image or mask was replaced; `None` if that is not known."""
        if self.contents is None:
            return None
        segments = self.segments and self.segments[self.pairs[index][1]].tobytes()
        return *self.pairs[index], *self.contents[index].tolist(), segments

    def fingerprint(self) -> str:
        """A fingerprint of the classes, a sample of the names and, on a local disk, of the sizes. In a bucket, of all
        names and contents.
        """
        some = [self.pairs[i] for i in fingerprint.sampled(len(self))]
        sizes = []
        if not places.in_bucket(self.root):
            sizes = [
                os.path.getsize(os.path.join(self.root, name)) for pair in some for name in pair
            ]
        segments = [self.segments[mask].tolist() for _, mask in some] if self.segments else ()
        mark = fingerprint.digest(self.masks, len(self), some, sizes, *segments)
        return fingerprint.with_contents(mark, self.pairs, self.contents)


def open_masks(config_data: Data) -> DataSet:
    """The images and masks at `config_data.path`.

    Raises:
      ConfigError: there is no such folder, it has another form, or an image has no mask.
    """
    root = epath.Path(config_data.path or ".").expanduser()
    if not config_data.path or not is_masked(root):
        absent = [f"{name}/" for name in (IMAGES, MASKS) if not (root / name).is_dir()]
        exists = config_data.path and root.exists()
        raise DataAbsent(
            f"config.data.path = {config_data.path!r} must be a folder with {IMAGES}/, {MASKS}/ and {TABLE}, or with "
            f"{MASKS}.json for panoptic masks"
            + (f": it has no {' and no '.join(absent)}" if exists else "")
            + places.nearest_existing(root)
        )
    where, tree = str(root), tree_at(root)
    panoptic = read_panoptic(root, tree.files_below(MASKS))
    table, segments = panoptic or (read_table(root / TABLE), None)
    pairs = _pairs(root, tree)
    if segments is not None:
        _check_segments(root, pairs, segments)
    tops = {image.split("/")[1] for image, _ in pairs}
    spelled = find_splits(tops)
    if len(spelled) == len(tops):
        splits = {
            split: [(pair, None) for pair in pairs if pair[0].split("/")[1] == top]
            for top, split in spelled.items()
        }
    else:
        spelled = {}
        splits = hold_out(
            [(pair, None) for pair in pairs], config_data, where, lambda pair: pair[0]
        )

    def make(classes, multi_label, keys, labels):
        contents = tree.contents([name for pair in keys for name in pair])
        if contents is not None:
            contents = contents.reshape(-1, 2)
        return MaskedImages(where, table, keys, segments=segments, contents=contents)

    data_set = Table(where, (), False, splits, spelled=spelled).data_set(make)
    digest = data_set.identity
    return dataclasses.replace(data_set, identity=lambda: fingerprint.digest(table, digest()))


def read_table(path: epath.Path) -> ClassTable:
    """The table in a CSV file with the columns `name` and `value`, or `name`, `red`, `green` and `blue`.

    Rows without a name are pixels that do not count, as the value 255 is unless a row names it; of a row without
    a value it is the row's number, from 0. Several rows of one name are one class.

    Raises:
      ConfigError: a column is missing, a number is none, a key occurs twice, or there are fewer than two classes.
    """
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist: list the classes of the masks there, a CSV file with the columns name and "
            "value, or name, red, green and blue"
        )
    rows = list(csv.DictReader(io.StringIO(read_text(path))))
    columns = {name.strip() for name in (rows[0] if rows else {}) if name}
    keys_of = COLOR if columns.issuperset(COLOR) else VALUE
    # Names alone are numbered by their rows; beside columns of other names that would be a guess.
    if "name" not in columns or not (columns.issuperset(keys_of) or columns == {"name"}):
        raise ConfigError(
            f"{path}: the first line must name the columns, name,value or name,red,green,blue, and it names "
            f"{','.join(sorted(columns)) or 'none'}"
        )
    classes, keys, labels = {}, [], []
    for number, row in enumerate(rows):
        row = {(key or "").strip(): (value or "").strip() for key, value in row.items()}
        given = [row.get(column, "") for column in keys_of]
        given = [str(number)] if keys_of == VALUE and given == [""] else given
        limit = 2**16 if keys_of == VALUE else 256
        if not all(text.isdecimal() and int(text) < limit for text in given):
            raise ConfigError(
                f"{path}, line {number + 2}: {', '.join(keys_of)} must be numbers below {limit}, got {given}"
            )
        keys.append(tuple(map(int, given)))
        name = row["name"]
        labels.append(classes.setdefault(name, len(classes)) if name else IGNORED)
    if twice := next((key for key in keys if keys.count(key) > 1), None):
        raise ConfigError(
            f"{path}: {', '.join(keys_of)} = {', '.join(map(str, twice))} occurs twice"
        )
    if not 2 <= len(classes) <= MAX_CLASSES:
        raise ConfigError(f"{path} must name 2 to {MAX_CLASSES} classes, and names {len(classes)}")
    return ClassTable(tuple(classes), tuple(keys), tuple(labels))


def is_masked(root: epath.Path) -> bool:
    """Whether a folder is one of images and masks."""
    return (root / IMAGES).is_dir() and (root / MASKS).is_dir()


def _check_segments(root: epath.Path, pairs: list[tuple[str, str]], segments: Segments) -> None:
    """Raises `ConfigError` if no JSON file lists the segments of a mask."""
    without = [mask for _, mask in pairs if mask not in segments]
    if without:
        raise ConfigError(
            f"{root}: {len(without)} masks have no segments in a JSON file; the first is {readable(without[0])}, which "
            f"{MASKS}.json or the JSON file named as its folder must list under annotations"
        )


def _pairs(root: epath.Path, tree: Tree) -> list[tuple[str, str]]:
    """(image, mask) files from the root.

    Raises:
      ConfigError: an image has no mask, or there are no images.
    """
    unused = Unused()
    masks = {name for name in tree.files_below(MASKS) if name.lower().endswith(".png")}
    pairs, without = [], []
    for image in filter(unused.is_image, tree.files_below(IMAGES)):
        mask = f"{MASKS}{os.path.splitext(image)[0].removeprefix(IMAGES)}.png"
        (pairs if mask in masks else without).append((image, mask))
    if without:
        image, mask = without[0]
        raise ConfigError(
            f"{root}: {len(without)} images have no mask; the first is {readable(image)}, whose mask would be "
            f"{readable(mask)}"
        )
    if not pairs:
        raise ConfigError(f"{root / IMAGES} has no images; it has {unused.text() or 'no files'}")
    if spare := len(masks) - len({mask for _, mask in pairs}):
        logging.warning("%s: %d masks belong to no image and are not used", root, spare)
    return pairs


def _good(content: bytes | BadImage) -> bytes:
    """What was read of a file. Raises the error that came instead."""
    if isinstance(content, BadImage):
        raise content
    return content
