"""Which data sets there are, by name. Each is found in a file of its own; what they give is in
`record.py`.
"""

import dataclasses
from collections.abc import Callable

from etils import epath

from vit_jax.data.record import BadImage, DataError, DataSet, Record, Source
from vit_jax.data.sources.digits import open_digits
from vit_jax.data.sources.folder import open_folder
from vit_jax.data.sources.mixture import MixedSet, open_mixture
from vit_jax.data.sources.named import NAMED
from vit_jax.data.sources.prepared import DESCRIPTION, open_prepared
from vit_jax.data.sources.tar import open_tar
from vit_jax.data.sources.tfds import open_tfds

__all__ = [
    "OPENERS", "BadImage", "DataError", "Record", "Source", "locate", "open_data_set", "open_eval",
    "open_source", "open_train",
]  # fmt: skip

OPENERS: dict[str, Callable[..., DataSet | MixedSet]] = {
    "digits": open_digits,
    "folder": open_folder,
    "prepared": open_prepared,
    "tar": open_tar,
    "mixture": lambda config_data: open_mixture(
        config_data, lambda text: open_data_set(locate(text, config_data))
    ),
}


def register(name: str, opener: Callable[..., DataSet]) -> None:
    """Adds a data source from outside the package: a function of `config.data`."""
    OPENERS[name] = opener


def open_data_set(config_data) -> DataSet | MixedSet:
    """The data set that `config.data` names: one of `OPENERS`, or else one of TFDS.

    Raises:
      ConfigError: there is no such data set, folder or class.
    """
    return OPENERS.get(config_data.name, open_tfds)(config_data)


def open_source(config_data, split: str) -> Source:
    """Opens a split of the data set that `config.data` names, every example once.

    Args:
      config_data: `config.data`.
      split: 'train', 'test', slices of them in the notation of TFDS ('train[:99%]'), or a sum
        ('train+test').

    Raises:
      ConfigError: there is no such data set, split, folder or class, or it is empty.
    """
    return open_data_set(config_data).open(split)


def open_train(config_data) -> Source:
    """The examples to train on."""
    data_set = open_data_set(config_data)
    if isinstance(data_set, MixedSet):
        return data_set.open_by_weight(config_data.train_split)
    return data_set.open(config_data.train_split)


def open_eval(config_data) -> Source:
    """The examples to evaluate on."""
    return open_source(config_data, config_data.eval_split)


def locate(text: str, config_data):
    """`config_data` with the `name` and `path` that `text` means: a known name, or a place that is
    there (a prepared data set, tar files, a folder, a list of files), or else a TFDS data set.
    """
    name, path = text, config_data.path
    place = epath.Path(text).expanduser()
    if text not in OPENERS and text not in NAMED:
        if place.suffix == ".tar" or any(place.glob("*.tar") if place.is_dir() else ()):
            name, path = "tar", text
        elif place.exists():
            name = "prepared" if (place / DESCRIPTION).exists() else "folder"
            path = text
    return dataclasses.replace(config_data, name=name, path=path)
