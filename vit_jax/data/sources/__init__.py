"""Which data sets there are, by name. Each kind has a file of its own; what they give is in
`record.py`.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Literal

import numpy as np
from absl import logging
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.data.options import AUTO, Data
from vit_jax.data.record import BadImage, DataAbsent, DataError, DataSet, Labels, Record, Source
from vit_jax.data.splits import SplitError

if TYPE_CHECKING:
    from vit_jax.data.sources.mixture import MixedSet

__all__ = [
    "OPENERS", "BadImage", "DataError", "Record", "Source", "check_features", "check_path", "locate",
    "open_data_set", "open_eval", "open_source", "open_train", "with_absolute_paths",
]  # fmt: skip

OPENERS: LazyTable[Callable[..., DataSet]] = LazyTable(
    {
        "digits": "vit_jax.data.sources.digits:open_digits",
        "digits_few": "vit_jax.data.sources.digits:open_few",
        "digit_scenes": "vit_jax.data.sources.digit_scenes:open_digit_scenes",
        "digit_things": "vit_jax.data.sources.digit_scenes:open_digit_things",
        "digit_pairs": "vit_jax.data.sources.digit_pairs:open_digit_pairs",
        "digit_scene_pairs": "vit_jax.data.sources.digit_scene_pairs:open_digit_scene_pairs",
        "pairs": "vit_jax.data.sources.pairs:open_pairs",
        "masks": "vit_jax.data.sources.masks:open_masks",
        "folder": "vit_jax.data.sources.folder:open_folder",
        "prepared": "vit_jax.data.sources.prepared:open_prepared",
        "tar": "vit_jax.data.sources.tar:open_tar",
        "objectnet": "vit_jax.data.sources.objectnet:open_objectnet",
        "mixture": "vit_jax.data.sources:_open_mixture",
    }
)
_COUNTED = 1 << 20  # labels at a time: numpy.bincount makes them 8 bytes each
_WITHOUT_PATH = tuple(name for name in OPENERS if name.startswith("digit"))


def register(name: str, opener: Callable[..., DataSet]) -> None:
    """Adds a data source from outside the package: a function of `config.data`."""
    OPENERS[name] = opener


def open_data_set(config_data: Data, *, is_logged: bool = True) -> "DataSet | MixedSet":
    """The data set that `config.data` names: one of `OPENERS`, or else one of TFDS.

    Args:
      config_data: `config.data`.
      is_logged: whether it is logged how files were understood, see `summary.py`.

    Raises:
      ConfigError: there is no such data set, folder or class.
    """
    if config_data.path:
        place = places.locate(config_data.path, "config.data.path")
        if places.is_address(config_data.path):
            config_data = dataclasses.replace(config_data, path=str(place))
    data_set = OPENERS.get(config_data.name, _open_tfds)(config_data)
    if is_logged and isinstance(data_set, DataSet) and data_set.summary:
        data_set.summary.log(config_data)
    if not config_data.cache or not isinstance(
        data_set, DataSet
    ):  # whose sets are cached one by one
        return data_set
    from vit_jax.data.cache import cached

    return dataclasses.replace(
        data_set, read=lambda parts: cached(data_set.read(parts), config_data)
    )


def _open_tfds(config_data: Data) -> DataSet:
    from vit_jax.data.sources.tfds import open_tfds

    return open_tfds(config_data)


def _open_mixture(config_data: Data) -> "MixedSet":
    from vit_jax.data.sources.mixture import open_mixture

    where = "config.data.mixture"
    return open_mixture(config_data, lambda text: open_data_set(locate(text, config_data, where)))


def open_source(config_data: Data, split: str) -> Source:
    """Opens a split of the data set that `config.data` names, every example once.

    Args:
      config_data: `config.data`.
      split: 'train', 'test', slices of them in the notation of TFDS ('train[:99%]'), or a sum
        ('train+test').

    Raises:
      ConfigError: there is no such data set, split, folder or class, or it is empty.
    """
    return open_data_set(config_data).open(split)


def open_train(config_data: Data) -> Source:
    """The examples to train on. Warns of classes without any.

    Raises:
      ConfigError: see `open_source`; or the examples cannot be sampled as `config.data.sampling` says.
    """
    data_set = open_data_set(config_data)
    opened = data_set.open if isinstance(data_set, DataSet) else data_set.open_by_weight
    source = _open_split(opened, config_data, "train_split")
    _check_readable(source, config_data, "training")
    labels = source.labels
    if config_data.sampling == "balanced":
        from vit_jax.data.balanced import check_balanced

        check_balanced(source, labels, config_data)
    if labels is not None:
        _warn_of_empty_classes(source.classes, labels, config_data)
    return source


def _warn_of_empty_classes(classes: tuple[str, ...], labels: Labels, config_data: Data) -> None:
    if isinstance(labels, tuple):
        labels = np.fromiter(itertools.chain.from_iterable(labels), np.int64)
    counts = np.zeros(len(classes), np.int64)
    for first in range(0, len(labels), _COUNTED):
        part = labels[first : first + _COUNTED]
        counts += np.bincount(part, minlength=len(classes))[: len(classes)]
    empty = np.flatnonzero(counts == 0)
    if len(empty):
        some = ", ".join(repr(classes[i]) for i in empty[:5])
        if len(empty) > 5:
            some += ", …"
        hint = "; do the labels count from 1? They should from 0" if list(empty) == [0] else ""
        logging.warning(
            "config.data: %d of %d classes have no images in %r: %s%s",
            len(empty), len(classes), config_data.train_split, some, hint,
        )  # fmt: skip


def open_eval(config_data: Data) -> Source:
    """The examples to evaluate on."""
    source = _open_split(open_data_set(config_data).open, config_data, "eval_split")
    _check_readable(source, config_data, "evaluation")
    return source


def _open_split(
    opened: Callable[[str], Source], config_data: Data, field: Literal["train_split", "eval_split"]
) -> Source:
    """The split that a field of the config names. Raises `ConfigError`, which names the field."""
    split = getattr(config_data, field)
    try:
        return opened(split)
    except SplitError as error:
        held_out = split == "test" and config_data.name in ("folder", "tar")
        share = f"; config.data.holdout = {config_data.holdout:g} is the share of it"
        hint = share if held_out and "holdout_from" not in str(error) else ""
        raise ConfigError(f"config.data.{field} = {split!r}: {error}{hint}") from None


def _check_readable(source: Source, config_data: Data, kind: str) -> None:
    """Raises `DataError` if it is known before images are read that too many of them cannot be."""
    problems: Mapping[str, str] = getattr(source, "problems", {})
    if not problems:
        return
    from vit_jax.data.batches import check_bad_images, pass_over

    pass_over(BadImage(*next(iter(problems.items()))), config_data)
    check_bad_images(dict(problems), config_data.max_bad_images, kind)
    if len(problems) == len(source):
        name, why = next(iter(problems.items()))
        raise DataError(
            f"none of the {len(source):,} {kind} images can be read, the first is {name}: {why}"
        )


def locate(text: str, config_data: Data, where: str = "config.data") -> Data:
    """`config_data` with the `name` and `path` that `text` means: a known name, or a place that is
    there (a prepared data set, tar files, a folder, a list of files), or else a TFDS data set.

    Args:
      where: the flag or field that has it, for messages.
    """
    name = text
    path = config_data.path
    if places.is_address(text):
        text = str(places.locate(text))
    place = epath.Path(text).expanduser()
    if not _is_known(text):
        # Not `glob`, which lists all folders of a bucket.
        inside = place.iterdir() if place.is_dir() else ()
        if place.suffix.lower() in (".tar", ".zip") or any(
            file.suffix == ".tar" for file in inside
        ):
            name = "tar"
            path = text
        elif place.exists():
            name = _format_of(place)
            path = text
        elif text.startswith((*"/~.", "file:")) or not text:
            raise DataAbsent(f"{where}: {text!r} does not exist{places.nearest_existing(text)}")
    return dataclasses.replace(config_data, name=name, path=path)


def _format_of(place: epath.Path) -> str:
    """The name of the opener of a folder, or of a file that lists images."""
    from vit_jax.data.sources import masks, prepared

    if masks.is_masked(place):
        return "masks"
    return "prepared" if (place / prepared.DESCRIPTION).exists() else "folder"


def _is_known(name: str) -> bool:
    """Whether a data set has this name."""
    if name in OPENERS:
        return True
    from vit_jax.data.sources.known_sets import NAMED

    return name in NAMED


def with_absolute_paths(config_data: Data) -> Data:
    """`config_data` with absolute paths, so that they mean the same from every working folder."""
    if config_data.mixture:
        from vit_jax.data.sources.mixture import check_mixture

        check_mixture(config_data.mixture)
    mixture = tuple(
        (places.absolute(text, "config.data.mixture"), weight)
        if _is_place(text)
        else (text, weight)
        for text, weight in config_data.mixture
    )
    return dataclasses.replace(
        config_data,
        path=places.absolute(config_data.path, "config.data.path"),
        mask_table=places.absolute(config_data.mask_table, "config.data.mask_table"),
        cache=places.absolute(config_data.cache, "config.data.cache"),
        mixture=mixture,
    )


def check_path(config_data: Data) -> None:
    """Raises `ConfigError` if a path is named and the data set is one that has none."""
    if config_data.path and config_data.name in _WITHOUT_PATH:
        raise ConfigError(
            f"config.data.path = {config_data.path!r} has no effect with config.data.name = "
            f"{config_data.name!r}: set --config.data.name=folder (or prepared, tar) to read it"
        )


def check_features(config_data: Data) -> None:
    """Raises `ConfigError` if features are named and the data set has none, or a table of masks and no masks."""
    for field in ("image_feature", "mask_feature", "mask_table"):
        value = getattr(config_data, field)
        # A recipe sets `AUTO`: it takes whatever masks a data set has.
        if value and value != AUTO and config_data.name in OPENERS:
            raise ConfigError(
                f"config.data.{field} = {value!r} has no effect with config.data.name = {config_data.name!r}: only "
                "data sets of TFDS have features. Leave it empty"
            )
    if config_data.mask_table and not config_data.mask_feature:
        raise ConfigError(
            f"config.data.mask_table = {config_data.mask_table!r} has no effect without masks: set "
            "--config.data.mask_feature=auto, or the name of the feature"
        )


def _is_place(text: str) -> bool:
    """Whether `text`, in a mixture, is a file or folder rather than the name of a data set."""
    if places.is_address(text):
        return True
    if _is_known(text):
        return False
    place = epath.Path(text).expanduser()
    return place.exists() or place.suffix == ".tar"
