"""How a folder, a list or an archive was understood, in lines that are logged before anything runs: its splits, its
classes, where labels come from, and what is skipped.
"""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping

import numpy as np
from absl import logging

from vit_jax.data.options import Data
from vit_jax.data.sources.split_names import has_both_sides
from vit_jax.data.sources.text import readable

_NAMED = 30  # classes, or reasons, in a line
_NAME = re.compile(r"[\w.-]+")  # of a split
_logged: set[tuple] = set()


@dataclasses.dataclass(frozen=True)
class Summary:
    """What a data set was understood to be.

    Attributes:
      where: what errors call it.
      sizes: split → examples.
      spelled: name of a folder or in a list → the split that it stands for.
      held_out: whether 'test' is held out of all examples.
      classes: the label names.
      counts: split → how many examples of each class, (classes,) integers; a call, since there may be many examples.
      labels_from: 'the names of folders', or another source of labels.
      skipped: reason → files, for the files that are no examples.
    """

    where: str
    sizes: Mapping[str, int]
    spelled: Mapping[str, str]
    held_out: bool
    classes: tuple[str, ...]
    counts: Callable[[], Mapping[str, np.ndarray]]
    labels_from: str
    skipped: Mapping[str, int]

    def lines(self, config_data: Data) -> list[str]:
        """A line each for splits, classes and what is skipped."""
        lines = [f"{self.where}: {self._splits(config_data)}", f"{self.where}: {self._classes()}"]
        if skipped := {why: count for why, count in self.skipped.items() if count}:
            some = [f"{count:,} {why}" for why, count in list(skipped.items())[:_NAMED]]
            lines.append(f"{self.where}: skipped: {', '.join(some)}")
        return lines

    def log(self, config_data: Data) -> None:
        """Logs how the data set was understood, once in a process for all that open it in the same way."""
        key = (self.where, *self.sizes.items(), config_data.train_split, config_data.eval_split)
        if key in _logged:
            return
        _logged.add(key)
        for line in self.lines(config_data):
            logging.info("%s", readable(line))

    def hint(self, split: str) -> str:
        """What to do where a split is not there; '' if there is nothing to say."""
        if split in self.sizes or "train" not in self.sizes or has_both_sides(self.sizes):
            return ""
        return (
            "; set --config.data.holdout_from=train to hold out a share of 'train' as 'test', or --config.data.path to "
            "a folder that has both"
        )

    def _splits(self, config_data: Data) -> str:
        written = {split: name for name, split in self.spelled.items() if name != split}
        named = []
        for split, size in self.sizes.items():
            as_written = f" ({readable(written[split])!r})" if split in written else ""
            named.append(f"{split} {size:,}{as_written}")
        text = f"splits: {', '.join(named)}"
        if self.held_out:
            return f"{text}; test is held out (config.data.holdout = {config_data.holdout:g})"
        used = _NAME.findall(f"{config_data.train_split} {config_data.eval_split}")
        unused = [split for split in self.sizes if split not in used]
        if unused and config_data.eval_split in self.sizes:
            text += (
                f"; judged by {config_data.eval_split}, not by {' or '.join(unused)}: "
                f"--config.data.eval_split={unused[0]} judges by it"
            )
        return text

    def _classes(self) -> str:
        if not self.classes:
            return "the images have no labels"
        of_splits = list(self.counts().values())
        named = [
            f"{name} ({' + '.join(f'{int(counts[label]):,}' for counts in of_splits)})"
            for label, name in enumerate(self.classes[:_NAMED])
        ]
        others = len(self.classes) - len(named)
        more = f", and {others:,} others" if others else ""
        total = np.sum(of_splits, axis=0)
        sizes = f" ({int(total.min()):,} to {int(total.max()):,} images each)" if others else ""
        return f"{len(self.classes):,} classes from {self.labels_from}{sizes}: {', '.join(named)}{more}"


def count_labels(labels: object, classes: int) -> np.ndarray:
    """How many examples of each class there are, (classes,) integers.

    Args:
      labels: one class for each example, or a tuple of classes for each.
    """
    if isinstance(labels, np.ndarray):
        return np.bincount(labels[labels >= 0], minlength=classes)
    as_tuples = (label if isinstance(label, tuple) else (label,) for label in labels)
    flat = np.fromiter(itertools.chain.from_iterable(as_tuples), np.int64)
    return np.bincount(flat, minlength=classes)
