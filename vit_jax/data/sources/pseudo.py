"""Examples with labels of people's beside such that a teacher has labelled; and which of the teacher's are kept.
Who asks the teacher is in `training/pseudo_labels.py`.
"""

import dataclasses

import numpy as np

from vit_jax.base.errors import UserError
from vit_jax.data.record import Record, Source
from vit_jax.data.sources import fingerprint
from vit_jax.data.sources.mixture import epoch_counts


@dataclasses.dataclass(frozen=True)
class PseudoLabels:
    """What a teacher says of some images.

    Attributes:
      images: (n,) int64, their numbers in a source, each once.
      probabilities: (n, classes) float16.
      order: (m,) int64, those to train on, as rows of the other two; duplicates among them.
    """

    images: np.ndarray
    probabilities: np.ndarray
    order: np.ndarray


def select_confident(probabilities: np.ndarray, confidence: float, per_class: int) -> PseudoLabels:
    """The images that a teacher is sure enough of, as many of each class (arXiv 1911.04252, §3.1).

    Args:
      probabilities: (images, classes), in [0, 1].
      confidence: the most probable class has to be more probable.
      per_class: the most confident of each class; of a class with fewer, all of them over and over; of one with
        none, none. 0: all, once.

    Raises:
      UserError: the teacher is sure of none.
    """
    best, sure = probabilities.argmax(1), probabilities.max(1)
    kept = np.argsort(-sure, kind="stable")
    kept = kept[sure[kept] > confidence]
    if not len(kept):
        raise UserError(
            f"the teacher is sure of none of {len(sure)} images: its most confident answer is {sure.max():.3f}, and "
            f"config.pseudo.confidence is {confidence}"
        )
    if per_class:
        classes = [kept[best[kept] == label] for label in np.unique(best[kept])]
        kept = np.concatenate([np.resize(ids, per_class) for ids in classes])
    images, order = np.unique(kept, return_inverse=True)
    return PseudoLabels(images, probabilities[images].astype(np.float16), order)


class PseudoLabelled:
    """An epoch of labelled examples and of `ratio` times as many that a teacher labelled: as long as it takes to
    see those that are oversampled least once, see `mixture`.

    Attributes:
      soft_labels: whether labels are probabilities; otherwise a class each.
    """

    labels, multi_label = None, False

    def __init__(
        self, labelled: Source, images: Source, given: PseudoLabels, *, ratio: float, soft: bool
    ):
        self.classes, self.soft_labels = labelled.classes, soft
        self._labelled, self._images, self._given = labelled, images, given
        self._own, self._others = epoch_counts([len(labelled), len(given.order)], [1, ratio])

    def __len__(self) -> int:
        return self._own + self._others

    def __getitem__(self, index: int) -> Record:
        if index < self._own:
            record = self._labelled[index % len(self._labelled)]
            if not self.soft_labels:
                return record
            one_hot = np.zeros(len(self.classes), np.float32)
            one_hot[record.label] = 1
            return dataclasses.replace(record, label=one_hot)
        row = self._given.order[(index - self._own) % len(self._given.order)]
        record, label = self._images[int(self._given.images[row])], self._given.probabilities[row]
        label = label.astype(np.float32)
        label = label / label.sum() if self.soft_labels else int(label.argmax())
        return dataclasses.replace(record, label=label)

    def fingerprint(self) -> str:
        """A fingerprint of all examples and of what the teacher says."""
        sources = self._labelled, self._images
        names, contents = fingerprint.split([source.fingerprint() for source in sources])
        given = self._given.images, self._given.probabilities, self._given.order
        return fingerprint.digest(*names, *given, len(self), self.soft_labels) + contents
