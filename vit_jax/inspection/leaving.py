"""Where images leave a model with several exits; of all of them only the few that are drawn are held."""

from collections.abc import Callable

import numpy as np


class Leaving:
    """Where images leave a model with several exits, gathered batch by batch.

    Attributes:
      thresholds: how probable the best class has to be to leave, at each exit but the last.
    """

    MOST = 8  # images of an exit that are kept to be drawn

    def __init__(self, judge: Callable, thresholds: tuple[float, ...]):
        """`judge` gives of images (B, H, W, C) the best class's probability at each exit (E, B), and its number."""
        self.thresholds = thresholds
        self._judge = judge
        self._confidences: list[np.ndarray] = []
        self._best: list[np.ndarray] = []
        self._surest: list[list[tuple[float, int, np.ndarray]]] = [[] for _ in (*thresholds, None)]
        self._count = 0

    def __call__(self, images: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of any images (B, H, W, C) the probability of the best class at each exit (E, B), and its number."""
        return self._judge(images)

    def add(self, images: np.ndarray) -> None:
        """Looks at further images."""
        confidences, best = self(images)
        self._confidences.append(confidences)
        self._best.append(best)
        for number, left in enumerate(leaves_at(confidences, self.thresholds)):
            sure = float(confidences[left, number])
            self._surest[left].append((sure, self._count + number, images[number]))
        for exit, kept in enumerate(self._surest):
            kept.sort(key=lambda entry: (-entry[0], entry[1]))
            self._surest[exit] = kept[: self.MOST]
        self._count += len(images)

    @property
    def confidences(self) -> np.ndarray:
        """(E, n) the probability of the best class at each exit."""
        return np.concatenate(self._confidences, axis=1)

    @property
    def best(self) -> np.ndarray:
        """(E, n) its number."""
        return np.concatenate(self._best, axis=1)

    def surest(self, exit: int) -> list[tuple[int, np.ndarray]]:
        """The images that leave at an exit with the highest probability, each with its number."""
        return [(number, image) for _, number, image in self._surest[exit]]


def leaves_at(confidences: np.ndarray, thresholds: tuple[float, ...]) -> np.ndarray:
    """The exit, from 0, at which each image leaves.

    Args:
      confidences: (E, n) probability of the best class.
      thresholds: how large it has to be at each exit but the last.

    Returns:
      (n,) integers.
    """
    enough = confidences >= np.array([*thresholds, -np.inf])[:, None]
    return enough.argmax(0)
