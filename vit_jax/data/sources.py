"""Which data sets there are, by name. Each is found in a file of its own; what they give is in
`record.py`.
"""

from collections.abc import Callable

from vit_jax.data.digits import open_digits
from vit_jax.data.folder import open_folder
from vit_jax.data.record import BadImage, Record, Source
from vit_jax.data.tfds import open_tfds

__all__ = ["OPENERS", "BadImage", "Record", "Source", "open_eval", "open_source", "open_train"]

OPENERS: dict[str, Callable[..., Source]] = {"digits": open_digits, "folder": open_folder}


def open_source(config_data, split: str) -> Source:
    """Opens a split of the data set that `config.data` names: one of `OPENERS`, or else a prepared
    TFDS data set.

    Args:
      config_data: `config.data`.
      split: 'train', 'test', slices of them in the notation of TFDS ('train[:99%]'), or a sum
        ('train+test').

    Raises:
      ConfigError: there is no such data set, split, folder or class, or it is empty.
    """
    return OPENERS.get(config_data.name, open_tfds)(config_data, split)


def open_train(config_data) -> Source:
    """The examples to train on."""
    return open_source(config_data, config_data.train_split)


def open_eval(config_data) -> Source:
    """The examples to evaluate on."""
    return open_source(config_data, config_data.eval_split)
