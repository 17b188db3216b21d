"""Classes matched by name: the labels of a data set in the numbering of another, or of a model."""

import dataclasses
import re
from collections.abc import Sequence

from absl import logging

from vit_jax.base.errors import ConfigError
from vit_jax.data.record import Record, Source, read_records

_WORDNET = re.compile(r"n\d{8}")
_NAMED = 5  # classes in a message
_ORDERED = 6  # classes of each order in a message


class UnknownNames(tuple):
    """The numbers '0', '1', … of the classes of a checkpoint that does not have their names."""


@dataclasses.dataclass(frozen=True)
class Relabelled:
    """A source whose labels are renumbered: `numbers[old]` is the new one."""

    source: Source
    classes: tuple[str, ...]
    numbers: tuple[int, ...]

    @property
    def multi_label(self) -> bool:
        """As in the source."""
        return self.source.multi_label

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Record:
        return self._relabelled(self.source[index])

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order, with the numbers of the new classes."""
        return [self._relabelled(record) for record in read_records(self.source, indices)]

    def _relabelled(self, record: Record) -> Record:
        label = record.label
        multi_label = isinstance(label, tuple)
        new = tuple(self.numbers[old] for old in label) if multi_label else self.numbers[label]
        return dataclasses.replace(record, label=new)


def with_classes(source: Source, classes: tuple[str, ...], order: str = "ask") -> Source:
    """The source with labels that number `classes`, which are matched by name. The source may have
    only some of them.

    Where the model's are ImageNet's, the source may name them by WordNet ids, all or some of them.
    Where the classes of one side are mere numbers, or WordNet's ids in their order, which is the order
    of ImageNet's classes, they are taken in order, with a warning.

    Args:
      source: of the examples.
      classes: names in the order of the model's answers.
      order: `config.data.class_order`.

    Raises:
      ConfigError: the source has no labels, or a class that is not among them; or the model has no names and the names
        of class folders two orders.
    """
    source = _with_accents_of(source, classes)
    if isinstance(classes, UnknownNames) and _has_two_orders(source, classes):
        return _in_order(source, classes, order)
    if source.classes == classes:
        return source
    if not source.classes:
        raise ConfigError("the examples to evaluate on have no labels")
    number = number_of_names(classes)
    unknown = [name for name in source.classes if name not in number]
    if not unknown:
        return Relabelled(source, classes, tuple(number[name] for name in source.classes))
    if len(source.classes) == len(classes) and (_numbered(classes) or _numbered(source.classes)):
        logging.warning(
            "the %d classes of the model and of the data have other names, and one side only has "
            "numbers or WordNet's ids: they are taken in their order", len(classes),
        )  # fmt: skip
        return Relabelled(source, classes, tuple(range(len(classes))))
    others = " and others" if len(unknown) > _NAMED else ""
    more = ", …" if len(classes) > _NAMED else ""
    unknown_names = ", ".join(map(repr, unknown[:_NAMED]))
    known_names = ", ".join(map(repr, classes[:_NAMED]))
    raise ConfigError(
        f"the data has {len(source.classes)} classes, the model {len(classes)}, and they are not the "
        f"same: the model knows no {unknown_names}{others}; it knows "
        f"{known_names}{more}. Classes are matched by name: rename those of "
        "the data, or give the data a classes.txt"
    )


def _with_accents_of(source: Source, classes: tuple[str, ...]) -> Source:
    """The source with its classes called as in `classes`, where names differ only in how accents are stored."""
    if all(map(str.isascii, source.classes)):
        return source
    from vit_jax.data.sources.text import same_text

    known = {same_text(name): name for name in classes}
    composed = [same_text(name) for name in source.classes]
    names = tuple(map(known.get, composed, source.classes))
    if names == source.classes:
        return source
    return Relabelled(source, names, tuple(range(len(names))))


def _has_two_orders(source: Source, classes: tuple[str, ...]) -> bool:
    """Whether the folders of as many classes have another order as texts than by the numbers in their names."""
    if len(source.classes) != len(classes) or not getattr(source, "named_by_folders", False):
        return False
    return list(source.classes) != sorted(source.classes)


def _in_order(source: Source, classes: tuple[str, ...], order: str) -> Source:
    """The source with the classes of a model that has no names for them, in one of two orders of folders' names.

    Raises:
      ConfigError: a question, if `order` is 'ask'.
    """
    texts = sorted(source.classes)
    if order == "ask":
        raise ConfigError(
            f"the checkpoint has no names for its {len(classes)} classes, and those of the data have two orders. Set "
            f"--config.data.class_order=numbers for {_first(source.classes)} (as timm and vit_jax), or =texts for "
            f"{_first(texts)} (as torchvision's ImageFolder): the one that the model was trained in"
        )
    if order == "numbers":
        return Relabelled(source, classes, tuple(range(len(classes))))
    place = {name: number for number, name in enumerate(texts)}
    return Relabelled(source, classes, tuple(place[name] for name in source.classes))


def _first(classes: Sequence[str]) -> str:
    return ", ".join(classes[:_ORDERED]) + ", …" * (len(classes) > _ORDERED)


def number_of_names(classes: tuple[str, ...]) -> dict[str, int]:
    """The number of each class by its name; where the classes are ImageNet's, by its WordNet id and name too."""
    from vit_jax.data.labels import imagenet

    number = {name: i for i, name in enumerate(classes)}
    if imagenet.are_classes_of(classes):
        by_id = enumerate(imagenet.classes().items())
        number = {key: i for i, pair in by_id for key in pair} | number
    return number


def are_numbers(classes: tuple[str, ...]) -> bool:
    """Whether classes are called '0', '1', …, which is no name."""
    return classes == tuple(map(str, range(len(classes))))


def _numbered(classes: tuple[str, ...]) -> bool:
    ids = all(_WORDNET.fullmatch(name) for name in classes) and list(classes) == sorted(classes)
    return ids or are_numbers(classes)
