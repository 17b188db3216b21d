"""Data sets that TFDS has prepared, stored as ArrayRecord or TFRecord, read without TensorFlow.

Preparing one needs TensorFlow, and is done in `preparation/download.py`. What the papers make of
TFDS's data sets is in `known_sets.py`.
"""

import os
from collections.abc import Sequence

import numpy as np
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.data.decoding import decode
from vit_jax.data.options import Data
from vit_jax.data.record import DataAbsent, DataSet, Label, Record
from vit_jax.data.sources import arrayrecord, fingerprint, tfrecord
from vit_jax.data.sources.arrayrecord import ArrayRecords
from vit_jax.data.sources.known_sets import NAMED, Named
from vit_jax.data.sources.stored_index import Kind
from vit_jax.data.sources.tfds_masks import ImageAndMask, choose_features
from vit_jax.data.sources.tfrecord import TfRecords

_LABELS = ("label", "labels", "real_label")
_FORMATS = ("array_record", "tfrecord")


class Tfds:
    """Parts of the data set in the folder that TFDS prepared, (split, start, stop) each; `name` is
    that of a data set in `known_sets.NAMED`, or ''. Labels are masks where `chosen` has a feature with some.
    """

    labels = None  # they are in the records

    def __init__(
        self, folder: str, parts: list[tuple[str, int, int]], name: str, chosen: ImageAndMask
    ):
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(folder)
        self._args = folder, parts, name, chosen
        self._named, self._chosen = NAMED.get(name, Named(name, 0)), chosen
        self.masks = chosen.table
        if self.masks is None:
            labels = self._choose_label(builder.info.features, folder, name)
        else:
            labels = chosen.mask, self.masks.classes, False
        self._label, self.classes, self.multi_label = labels
        needed = {chosen.image, "file_name", *self._named.features, self._label}
        # Only what is needed is decoded; images are left to `decode.py`, and masks to their table.
        self._features = tfds.features.FeaturesDict(
            {key: feature for key, feature in builder.info.features.items() if key in needed}
        )
        self._decoders = {
            key: tfds.decode.SkipDecoding() for key in (chosen.image, chosen.mask) if key
        }
        self._split = "+".join(f"{name}[{start}:{stop}]" for name, start, stop in parts)
        self._where = f"{builder.info.full_name} {self._split}"
        self._sizes = {split: part.num_examples for split, part in builder.info.splits.items()}
        self._records = _open_records(builder, self._split)

    def __reduce__(self):
        # Open files do not travel to another process: it opens its own.
        return type(self), self._args

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self._record(index, self._records[index])

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order."""
        stored = self._records.read(indices)
        return [self._record(*pair) for pair in zip(indices, stored, strict=True)]

    def _record(self, index: int, stored: bytes) -> Record:
        fields = self._features.deserialize_example_np(stored, decoders=self._decoders)
        file = fields.get("file_name", b"")
        name = f"{self._where}, record {index}" + (f" ({file.decode()})" if file else "")
        image = fields[self._chosen.image]
        if self._named.white != 255:
            image = decode.decode(image, name=name) * np.uint8(255 // self._named.white)
        return Record(image, self._label_of(fields), name)

    def _choose_label(self, features, folder: str, name: str) -> tuple:
        """The feature with the label, the class names, and whether there are several labels."""
        return _labels(features, folder, name)

    def _label_of(self, fields: dict) -> Label:
        if self._label is None:
            return None
        label = self._label(fields) if callable(self._label) else fields[self._label]
        if self.masks is not None:
            return label
        return tuple(int(number) for number in np.ravel(label)) if self.multi_label else int(label)

    def fingerprint(self) -> str:
        """A fingerprint of TFDS's name, version and sizes, and of which features are read."""
        return fingerprint.digest(self._where, self._sizes, self.classes, *_unusual(self._chosen))


def open_tfds(config_data: Data) -> DataSet:
    """The data set `config_data.name` ('cifar10', 'vtab/dtd', 'name/config', 'name:1.0.0') under
    `config_data.path`; with masks if `config_data.mask_feature` is set.

    Raises:
      ConfigError: it is not there, is stored in another form, or see `tfds_masks.choose_features`.
    """
    name = config_data.name
    named = NAMED.get(name)
    folder = str(find_folder(data_dir(config_data.path), name))

    import tensorflow_datasets as tfds  # slow to import; what is missing is reported before it

    info = tfds.builder_from_directory(folder).info
    if info.file_format.value not in _FORMATS:
        raise ConfigError(
            f"{folder} is stored as {info.file_format.value}, not as {' or '.join(_FORMATS)}: "
            "prepare it with file_format='array_record'"
        )
    sizes = {split: part.num_examples for split, part in info.splits.items()}
    chosen = choose_features(info.features, config_data, _tfds_name(name), folder)
    return DataSet(
        folder,
        sizes,
        lambda parts: Tfds(folder, parts, name if named else "", chosen),
        named.splits if named else {},
        lambda: repr((name, info.full_name, sizes, *_unusual(chosen))),
    )


def is_there(config_data: Data) -> bool:
    """Whether TFDS has prepared the data set."""
    name = config_data.name
    path, _, version = _tfds_name(name).partition(":")
    folder = data_dir(config_data.path) / path
    return folder.exists() and any(folder.glob(f"{version or '*'}/dataset_info.json"))


def data_dir(path: str) -> epath.Path:
    """The folder in which TFDS keeps its data sets; `path` if that says one."""
    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    return places.locate(path or default, "config.data.path" if path else "TFDS_DATA_DIR")


def _tfds_name(name: str) -> str:
    """TFDS's own name of a data set, 'name', 'name/config' or 'name:1.0.0'."""
    return NAMED[name].tfds if name in NAMED else name


def _unusual(chosen: ImageAndMask) -> tuple[ImageAndMask, ...]:
    """What fingerprints have of `chosen`: nothing, as in earlier versions, where it is the default."""
    return () if chosen == ImageAndMask() else (chosen,)


def _open_records(builder, split: str) -> ArrayRecords | TfRecords:
    """The stored examples of a split expression."""
    parts = builder.info.splits[split].file_instructions
    files = [(part.filename, part.skip, part.skip + part.take) for part in parts]
    if _kind(builder) is tfrecord.KIND:
        return TfRecords(files)
    return ArrayRecords(files, {part.filename: part.examples_in_shard for part in parts})


def record_files(config_data: Data) -> tuple[list[str], Kind]:
    """The paths of all files of a data set, and of which kind they are; for `Raises` see `open_tfds`."""
    folder = find_folder(data_dir(config_data.path), config_data.name)

    import tensorflow_datasets as tfds

    builder = tfds.builder_from_directory(str(folder))
    splits = builder.info.splits.values()
    return [str(path) for split in splits for path in split.filepaths], _kind(builder)


def _kind(builder) -> Kind:
    return tfrecord.KIND if builder.info.file_format.value == "tfrecord" else arrayrecord.KIND


def find_folder(root: epath.Path, name: str) -> epath.Path:
    """The folder ROOT/NAME[/CONFIG]/VERSION; of the newest version, if the name does not say which."""
    path, _, version = _tfds_name(name).partition(":")
    folder = root / path
    if not folder.exists():
        raise DataAbsent(_not_prepared(root, name))
    versions = [info.parent for info in folder.glob(f"{version or '*'}/dataset_info.json")]
    if versions:
        return max(versions, key=_version)
    variants = {info.parent.parent.name for info in folder.glob("*/*/dataset_info.json")}
    if variants and not version:
        raise ConfigError(
            f"{path!r} has variants, {path}/VARIANT; there are: {', '.join(sorted(variants))}"
        )
    raise DataAbsent(_not_prepared(root, name))


def _version(folder: epath.Path) -> tuple[int, ...]:
    """The version that a folder is called: '1.10.0' comes after '1.9.0'."""
    return tuple(int(part) if part.isdecimal() else -1 for part in folder.name.split("."))


def _not_prepared(root, name: str) -> str:
    """What to do about a data set that is not there."""
    if name in NAMED and NAMED[name].by_hand:
        return NAMED[name].by_hand
    prepared = sorted(e.name for e in root.iterdir() if e.is_dir()) if root.is_dir() else []
    hint = ""
    if name not in NAMED and not is_tfds_name(name):
        hint = nearest(name, ["digits", "folder", "prepared", "tar", "mixture", *NAMED, *prepared])
    if "did you mean" not in hint:
        hint = f"; prepared are: {', '.join(prepared) or 'none'}"
    if root.is_file():
        hint = (
            ", which is a file: of a tar file set --config.data.name=tar, of a list of images "
            "--config.data.name=folder"
        )
    return (
        f"config.data.name = {name!r} is not prepared in {root}{hint}. 'digits' comes with the install, "
        "'folder' reads your own images; others are prepared once, with TensorFlow: "
        f"vit_jax prepare {name} --out=DIR"
    )


def is_tfds_name(name: str) -> bool:
    """Whether TFDS can prepare a data set of this name: 'name', 'name/config' or 'name:1.0.0'."""
    return name.split("/")[0].split(":")[0] in tfds_names()


def tfds_names() -> list[str]:
    """The data sets that TFDS itself can prepare; found without a network and without TensorFlow."""
    import tensorflow_datasets as tfds

    return tfds.list_builders(with_community_datasets=False)


def _labels(features, folder: str, name: str):
    """The feature that holds the label (or the function that makes it; `None` if there is no label),
    the class names, and whether an example has several labels.
    """
    import tensorflow_datasets as tfds

    named = NAMED.get(name)
    if named and callable(named.label):
        return named.label, tuple(map(str, range(named.classes))), False
    class_labels = {}
    for key, feature in features.items():
        element = feature.feature if isinstance(feature, tfds.features.Sequence) else feature
        if isinstance(element, tfds.features.ClassLabel):
            class_labels[key] = (key, tuple(element.names), element is not feature)
    if not class_labels and not (named and named.classes):
        return None, (), False
    usual = [key for key in (named.label,) if key in class_labels] if named else []
    usual += [key for key in _LABELS if key in class_labels]
    if not usual and len(class_labels) != 1:
        usual = " or ".join(_LABELS)
        raise ConfigError(
            f"{folder} needs one class label, or one called {usual}; its features: {', '.join(features)}"
        )
    key, classes, multi_label = class_labels[usual[0] if usual else next(iter(class_labels))]
    if named and len(classes) != named.classes:
        raise ConfigError(f"{folder} has {len(classes)} classes, {name!r} has {named.classes}")
    return key, classes, multi_label
