"""Several data sets as one, mixed by weight.

Training: with weights w, set i makes up the share w_i / Σw of an epoch, exactly. An epoch is as
long as it takes to see the set that is oversampled least once: N = max_i n_i · Σw / w_i examples;
each of the other sets is repeated, so that within an epoch the counts of its examples differ by at
most one. Which example stands where in the epoch is decided as for any source: by a permutation of
the N places that depends on the seed and the epoch alone.

Evaluation, and any other use: every example of every set once.

Classes are joined by name: those of the first set, then what further sets add. If one of the sets
has no labels, the mixture has none.
"""

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Sequence

from vit_jax.base.errors import ConfigError
from vit_jax.data.options import Data
from vit_jax.data.record import DataSet, Label, Record, Source, read_records
from vit_jax.data.sources import fingerprint

_MOST = 2**40  # examples of a set in an epoch


class Mixture:
    """`sources` one after the other, the examples of source i `counts[i]` times in all."""

    labels = None

    def __init__(self, sources: Sequence[Source], counts: Sequence[int]):
        if len({source.multi_label for source in sources if source.classes}) > 1:
            raise ConfigError(
                "config.data.mixture: sets with one label and sets with several cannot be mixed"
            )
        labelled = all(source.classes for source in sources)
        names = dict.fromkeys(name for source in sources for name in source.classes)
        self.classes = tuple(names) if labelled else ()
        self.multi_label = labelled and sources[0].multi_label
        number = {name: label for label, name in enumerate(self.classes)}
        self._labels = [[number[name] for name in source.classes] for source in sources if labelled]
        self._sources, self._counts = tuple(sources), tuple(counts)
        self._ends = list(itertools.accumulate(counts))

    def __reduce__(self):
        return Mixture, (self._sources, self._counts)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Record:
        which, within = self._place(index)
        record = self._sources[which][within]
        return dataclasses.replace(record, label=self._label(record, which))

    def read(self, indices: Sequence[int]) -> list[Record]:
        """The records at `indices`, in their order; those of each source are read at once."""
        by_index, wanted = {}, {}
        for index in indices:
            which, within = self._place(index)
            wanted.setdefault(which, []).append((index, within))
        for which, pairs in wanted.items():
            records = read_records(self._sources[which], [within for _, within in pairs])
            for (index, _), record in zip(pairs, records, strict=True):
                by_index[index] = dataclasses.replace(record, label=self._label(record, which))
        return [by_index[index] for index in indices]

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the source that has an example, and the index in there."""
        which = bisect.bisect_right(self._ends, index)
        within = index - (self._ends[which - 1] if which else 0)
        return which, within % len(self._sources[which])

    def _label(self, record: Record, which: int) -> Label:
        """The label of a record of the source number `which`, among the classes of all."""
        if not self.classes:
            return None
        labels = self._labels[which]
        if self.multi_label:
            return tuple(labels[number] for number in record.label)
        return labels[record.label]

    def fingerprint(self) -> str:
        """A fingerprint of those of the sets, and of how often each is seen."""
        names, contents = fingerprint.split([source.fingerprint() for source in self._sources])
        return fingerprint.digest(names, self._counts) + contents


@dataclasses.dataclass(frozen=True)
class MixedSet:
    """Data sets that are mixed; any split expression is taken of each of them."""

    sets: tuple[DataSet, ...]
    weights: tuple[float, ...]

    def open(self, split: str) -> Mixture:
        """Every example of every set once."""
        sources = [data_set.open(split) for data_set in self.sets]
        return Mixture(sources, [len(source) for source in sources])

    def open_by_weight(self, split: str) -> Mixture:
        """An epoch of the mixture, for training."""
        sources = [data_set.open(split) for data_set in self.sets]
        return Mixture(sources, epoch_counts([len(source) for source in sources], self.weights))


def open_mixture(config_data: Data, open_one: Callable[[str], DataSet]) -> MixedSet:
    """The sets in `config_data.mixture`, (name or path, weight) each, which `open_one` finds."""
    if not config_data.mixture:
        raise ConfigError(
            "config.data.mixture is empty: 'mixture' needs ((NAME or PATH, WEIGHT), …), e.g. "
            "--config.data.mixture=\"(('cifar10', 1), ('/data/birds', 3))\""
        )
    check_mixture(config_data.mixture)
    if any(name == "mixture" for name, _ in config_data.mixture):
        raise ConfigError(
            "config.data.mixture: a mixture cannot be one of its own sets; name those it has"
        )
    names, weights = zip(*config_data.mixture, strict=True)
    return MixedSet(tuple(open_one(name) for name in names), weights)


def check_mixture(entries: tuple) -> None:
    """Raises `ConfigError` unless the entries of `config.data.mixture` are names with weights."""
    for entry in entries:
        good = isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str)
        if not good or not isinstance(entry[1], int | float) or not entry[1] > 0:
            raise ConfigError(
                f"config.data.mixture: {entry!r} is not (NAME or PATH, WEIGHT) with a weight above 0"
            )


def epoch_counts(sizes: Sequence[int], weights: Sequence[float]) -> list[int]:
    """How many examples of each set an epoch has.

    >>> epoch_counts([1000, 50], [3, 1])
    [1000, 333]
    """
    per_weight = max(size / weight for size, weight in zip(sizes, weights, strict=True))
    if not per_weight * max(weights) < _MOST:
        raise ConfigError(
            f"config.data.mixture: with the weights {', '.join(f'{w:g}' for w in weights)} an epoch, in which all "
            f"images of each set are seen, has {per_weight * max(weights):.3g} examples: set weights that differ less"
        )
    return [round(per_weight * weight) for weight in weights]
