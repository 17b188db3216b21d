"""The 1,000 classes of ImageNet-1k (ILSVRC 2012), in the order of all published models: WordNet ids and names."""

import functools
import pathlib

from absl import logging

COUNT = 1000
_FILE = pathlib.Path(__file__).with_name("imagenet_classes.tsv")
_ENOUGH = 0.95  # of the names: data sets and hubs spell some of them differently


@functools.cache
def classes() -> dict[str, str]:
    """WordNet id → name of every class, in their order, which is that of the ids. Names are unique."""
    return dict(line.split("\t") for line in _FILE.read_text().splitlines())


def names_if_unnamed(count: int) -> tuple[str, ...]:
    """Names for the `count` classes of a checkpoint that has none: ImageNet's if there are as many, else numbers."""
    return tuple(classes().values()) if count == COUNT else tuple(map(str, range(count)))


def log_if_unnamed(names: tuple[str, ...] | None, count: int, source: object) -> None:
    """Logs that the `count` classes of a checkpoint get `names_if_unnamed`, if these are ImageNet's.

    Args:
      names: that the checkpoint has, if any.
      source: what the log calls it.
    """
    if not names and count == COUNT:
        logging.info("%s does not name its 1,000 classes: ImageNet-1k's names are used", source)


def are_classes_of(labels: tuple[str, ...]) -> bool:
    """Whether labels are ImageNet's classes in their order: ids, names, or names followed by synonyms."""
    if len(labels) != COUNT:
        return False
    if labels == tuple(classes()):
        return True
    pairs = zip(labels, classes().values(), strict=True)
    same = sum(label.split(",")[0].casefold() == name.casefold() for label, name in pairs)
    return same >= _ENOUGH * COUNT
