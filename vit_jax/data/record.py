"""What a data source gives: one record for one index; and what a data set is before a split of it
is opened. Each source's own file says how it finds its records.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from vit_jax.base.errors import ConfigError, UserError, reason
from vit_jax.data import splits

if TYPE_CHECKING:
    from vit_jax.data.sources.summary import Summary

Label = int | tuple | np.ndarray | bytes | None  # of one example; see `Record`
# Of all examples: (n,) integers; of a multi-label source a tuple of classes for each; `None` if
# there are no labels, or if they are not known before the examples are read.
Labels = np.ndarray | tuple[tuple[int, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class Record:
    """One example.

    Attributes:
      image: an encoded image, or pixels (H, W, C), see `decode.decode`.
      label: the class; of a multi-label source, a tuple of classes, which may be empty; of one with
        `soft_labels`, the probabilities of all, (classes,) float32; of one with `masks`, an encoded mask
        or an array (H, W), or what `segments.PanopticTable` takes; of a source of pairs its captions, a
        tuple of texts; `None` where the source has no labels.
      name: what error messages call it: a file, or a place in a data set.
    """

    image: bytes | np.ndarray
    label: Label
    name: str


class Source(Protocol):
    """Examples by index, in an order that never changes. Sources can be pickled: worker processes
    read them too. Any number of threads may read at the same time.

    A source may have a method `read(indices: Sequence[int]) -> list[Record]`, which gives the same as
    `[source[i] for i in indices]`, and raises what one of these raises; from a bucket, all of them are
    requested at once. `read_records` uses it where there is one.

    One in a bucket may have a method `identity(index) -> tuple | None`: plain data that differs where an example was
    replaced since, or `None` if that is not known. What `data.cache` kept of an example is used while it is the same.

    Attributes:
      classes: the label names; the label is the index. Empty where there are no labels: then the
        label of every record is `None`.
      multi_label: whether labels are tuples.
      labels: of all examples, if they are known without reading them.
    """

    classes: tuple[str, ...]
    multi_label: bool
    labels: Labels

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Record: ...

    def fingerprint(self) -> str:
        """A text that most likely differs if the examples, their labels or their order do; cheap,
        and the same wherever the data set lies.
        """


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A data set of which no image has been read yet.

    Attributes:
      where: what errors call it.
      sizes: the number of examples of every split.
      read: opens parts of it, (split, start, stop) each, as `splits.select` gives them.
      aliases: further names of splits, as split expressions: {'test': 'validation'}.
      identity: a text that differs wherever the examples or their order do.
      summary: how files were understood, where that is a matter of their names; else `None`.
    """

    where: str
    sizes: Mapping[str, int]
    read: Callable[[list[tuple[str, int, int]]], Source]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    identity: Callable[[], str] = str
    summary: "Summary | None" = None

    def open(self, split: str) -> Source:
        """The examples that a split expression names: 'train', 'train[:99%]', 'train+test'.

        Raises:
          ConfigError: there is no such split, or it is empty.
        """
        try:
            parts = splits.select(split, self.sizes, self.where, self.aliases)
        except splits.SplitError as error:
            hint = self.summary.hint(split) if self.summary else ""
            raise splits.SplitError(f"{error}{hint}") from None
        return self.read(parts)


def read_records(source: Source, indices: Sequence[int]) -> list[Record]:
    """The records of several indices, by the source's own `read` where it has one."""
    read = getattr(source, "read", None)
    return read(indices) if read else [source[index] for index in indices]


def soft_labels(source: Source) -> bool:
    """Whether labels are probabilities; few sources have such, and say so by an attribute of this name."""
    return getattr(source, "soft_labels", False)


class DataAbsent(ConfigError):
    """A data set is not where it is looked for."""


class DataError(UserError, ValueError):
    """The data is not what it should be, seen while it is read."""


class BadImage(DataError):
    """An image cannot be read."""

    def __init__(self, name: str, why: str):
        # Both are arguments, so that it survives the way back from a worker process.
        super().__init__(name, why)
        self.name = name
        self.why = why

    def __str__(self) -> str:
        has_no_file = self.name.startswith(("image ", "the image"))  # of `prediction.images`
        return f"{'' if has_no_file else 'image '}{self.name} cannot be read: {self.why}"


class TooLarge(BadImage):
    """An image has more bytes or pixels than it may have."""


@contextlib.contextmanager
def decoding(name: str) -> Iterator[None]:
    """What is raised inside becomes a `BadImage`: damaged files make decoders raise anything at all,
    and run out of memory.
    """
    try:
        yield
    except BadImage:
        raise
    except Exception as error:
        raise BadImage(name, reason(error)) from None


def check_bad_images(bad: dict[str, str], most: int, kind: str) -> None:
    """Raises `DataError` if more than `most` images for training or evaluation, which `kind` says,
    could not be read; `bad` has their names and the reasons.
    """
    if len(bad) > most:
        first_bad = list(bad.items())[:5]
        some = "; ".join(f"{name}: {why}" for name, why in first_bad)
        raise DataError(
            f"{len(bad)} {kind} images cannot be read, more than config.data.max_bad_images = {most} ({some}). "
            "Repair or remove them, or allow more."
        )
