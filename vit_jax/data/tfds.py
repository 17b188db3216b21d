"""Prepared TFDS data sets, stored as ArrayRecord, read without TensorFlow. Preparing needs it, and
is not done here.
"""

import os
from collections.abc import Sequence

import numpy as np

from vit_jax.data import splits
from vit_jax.data.record import Record
from vit_jax.schema import ConfigError, nearest

_LABELS = ("label", "labels", "real_label")


class Tfds:
    """A split of a data set in the folder that TFDS prepared, `parts` as `splits.select` gives
    them.
    """

    def __init__(self, folder: str, parts: list[tuple[str, int, int]]):
        import tensorflow_datasets as tfds

        builder = tfds.builder_from_directory(folder)
        self._folder, self._parts = folder, parts
        self._name = builder.info.full_name
        self._label, self.classes, self.multi_label = _label_feature(builder.info.features, folder)
        self._split = "+".join(f"{name}[{start}:{stop}]" for name, start, stop in parts)
        self._records = builder.as_data_source(
            self._split, decoders={"image": tfds.decode.SkipDecoding()}
        )

    def __reduce__(self):
        return Tfds, (
            self._folder,
            self._parts,
        )  # open files do not travel to another process: it opens its own

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> Record:
        return self.read([index])[0]

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records of `indices` in one block, a fifth of the time of one by one."""
        indices = [int(index) for index in indices]
        records = self._records.__getitems__(indices)
        return [self._record(index, fields) for index, fields in zip(indices, records, strict=True)]

    def _record(self, index: int, fields: dict) -> Record:
        label = fields[self._label]
        label = tuple(int(one) for one in np.ravel(label)) if self.multi_label else int(label)
        file = fields.get("file_name", b"")
        file = f" ({file.decode()})" if file else ""
        return Record(fields["image"], label, f"{self._name} {self._split}, record {index}{file}")


def open_tfds(config_data, split: str) -> Tfds:
    """Opens the data set `config_data.name` ('cifar10', 'name/config', 'name:1.0.0') under
    `config_data.path`.
    """
    import tensorflow_datasets as tfds
    from etils import epath

    default = os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets"
    folder = _find(epath.Path(config_data.path or default).expanduser(), config_data.name)
    info = tfds.builder_from_directory(folder).info
    if info.file_format.value != "array_record":
        raise ConfigError(
            f"{folder} is stored as {info.file_format.value}: prepare it with file_format='array_record'"
        )
    sizes = {name: one.num_examples for name, one in info.splits.items()}
    return Tfds(str(folder), splits.select(split, sizes, str(folder)))


def _find(root, name: str):
    """The folder ROOT/NAME[/CONFIG]/VERSION; of the newest version, if the name does not say which."""
    path, _, version = name.partition(":")
    versions = {}
    for info in (
        (root / path).glob(f"{version or '*'}/dataset_info.json") if (root / path).exists() else ()
    ):
        versions[
            tuple(int(part) if part.isdecimal() else -1 for part in info.parent.name.split("."))
        ] = info.parent
    if versions:
        return versions[max(versions)]
    variants = {info.parent.parent.name for info in (root / path).glob("*/*/dataset_info.json")}
    if variants and not version:
        raise ConfigError(
            f"{path!r} has variants, {path}/VARIANT; there are: {', '.join(sorted(variants))}"
        )
    there = (
        sorted(entry.name for entry in root.iterdir() if entry.is_dir()) if root.exists() else []
    )
    raise ConfigError(
        f"config.data.name = {name!r} is not prepared in {root}{nearest(name, ['digits', 'folder', *there])}. "
        "'digits' comes with the install, 'folder' reads your own images; others are prepared once, with TensorFlow, "
        f"by tfds.builder({name!r}, data_dir=…, file_format='array_record').download_and_prepare()"
    )


def _label_feature(features, folder: str) -> tuple[str, tuple[str, ...], bool]:
    """The feature that holds the label, its class names, and whether an example has many."""
    import tensorflow_datasets as tfds

    found = {}
    for name, feature in features.items():
        one = feature.feature if isinstance(feature, tfds.features.Sequence) else feature
        if isinstance(one, tfds.features.ClassLabel):
            found[name] = (name, tuple(one.names), one is not feature)
    if "image" not in features:
        raise ConfigError(f"{folder} has no feature 'image'; it has: {', '.join(features)}")
    usual = [name for name in _LABELS if name in found]
    if not usual and len(found) != 1:
        usual = " or ".join(_LABELS)
        raise ConfigError(
            f"{folder} needs one class label, or one called {usual}; its features: {', '.join(features)}"
        )
    return found[usual[0] if usual else next(iter(found))]
