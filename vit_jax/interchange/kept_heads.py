"""A head that a run keeps (`config.init_reset` does not name it), where its data has other classes than the
checkpoint: each class gets the row of its name.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np
from absl import logging

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_array import LazyArray
from vit_jax.data.labels.classes import are_numbers, number_of_names
from vit_jax.interchange.formats import LoadedCheckpoint
from vit_jax.models import classifier

_NAMED = 5  # classes in a message


def with_rows_by_name(
    checkpoint: LoadedCheckpoint,
    classes: Sequence[str],
    reset: Iterable[str] | None,
    *,
    is_logged: bool = True,
) -> LoadedCheckpoint:
    """The checkpoint with the rows of its heads in the order of other classes; zeros for those that it lacks.

    Where one side has no names, or mere numbers, rows stay in their order.

    Args:
      checkpoint: its arrays unread.
      classes: of the data to train on; () for a model without a head.
      reset: patterns of the parameters that are re-initialised; `None`: the heads are.
      is_logged: whether the log says which rows are taken.

    Raises:
      ConfigError: the checkpoint has none of these classes.
    """
    own = tuple(checkpoint.classes or ())
    classes = tuple(classes)
    kept = _kept_heads(checkpoint, reset)
    if not kept or not own or not classes or own == classes:
        return checkpoint
    if are_numbers(own) or are_numbers(classes):
        if is_logged and len(own) == len(classes):
            logging.warning(
                "config.init_reset keeps the head, whose rows stay in their order: the classes are called %s in the "
                "checkpoint and %s in the data, and one side has numbers alone", _listed(own), _listed(classes),
            )  # fmt: skip
        return checkpoint
    number = number_of_names(own)
    new = [name for name in classes if name not in number]
    if len(new) == len(classes):
        raise ConfigError(
            f"config.init_reset keeps the head, and the checkpoint has none of the classes of the data: it has "
            f"{_listed(own)}, the data has {_listed(classes)}. Name the head in config.init_reset "
            "(\"('head/.*',)\"), or give the data a classes.txt with the checkpoint's names"
        )
    if is_logged and new:
        logging.warning(
            "config.init_reset keeps the head, and the checkpoint lacks classes of the data, whose rows are zeros: %s",
            _listed(new),
        )
    if is_logged:
        logging.info(
            "the head is kept: each class of the data gets the checkpoint's row of its name"
        )
    rows = [number.get(name) for name in classes]

    def in_order(name: str, leaf: LazyArray) -> LazyArray:
        return _selected(leaf, rows) if name in kept else leaf

    return dataclasses.replace(
        checkpoint,
        model_config=dataclasses.replace(checkpoint.model_config, num_classes=len(classes)),
        params=patterns.map_named(in_order, checkpoint.params),
        classes=classes,
    )


def _kept_heads(checkpoint: LoadedCheckpoint, reset: Iterable[str] | None) -> set[str]:
    """The names of the heads' arrays, with classes along their last axis, that are not re-initialised."""
    if reset is None:
        return set()
    heads = patterns.matching([classifier.HEADS], patterns.names(checkpoint.params))
    arrays = patterns.named(checkpoint.params)
    count = checkpoint.model_config.num_classes
    named = set(heads) - set(patterns.matching(reset, heads))
    return {name for name in named if arrays[name].shape[-1] == count}


def _selected(array: LazyArray, rows: Sequence[int | None]) -> LazyArray:
    """(..., classes) -> (..., len(rows)): the rows of these numbers, zeros for `None`."""
    shape = (*array.shape[:-1], len(rows))

    def read() -> np.ndarray:
        old = np.asarray(array)
        new = np.zeros(shape, array.dtype)
        for row, number in enumerate(rows):
            if number is not None:
                new[..., row] = old[..., number]
        return new

    return LazyArray(shape, np.dtype(array.dtype), read)


def _listed(names: Sequence[str]) -> str:
    more = ", …" if len(names) > _NAMED else ""
    return f"{', '.join(map(repr, names[:_NAMED]))}{more}"
