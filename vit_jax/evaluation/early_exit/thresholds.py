"""How confident an image has to be to leave a network at an early exit. NumPy alone: models and data
are not here.

Of E exits, exit i takes the images whose confidence reaches threshold i and that no exit before it
took; the last takes the rest, so that there are E - 1 thresholds. The confidence is the largest
probability, but any number will do that is larger for easier images.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

NOBODY = 2.0  # A threshold above all probabilities: no image leaves.
GEOMETRIC = tuple(k / 20 for k in range(1, 60))  # the settings of the official code
_COMBINATIONS = 4096  # of earlier thresholds that the first search tries
_REFINED = 256  # and those around the best ones


class Outcome(NamedTuple):
    """What thresholds come to on some images.

    Attributes:
      accuracy: share of the images that are right at the exit they leave at.
      cost: mean of the costs of these exits.
      shares: of the images that leave at each exit.
    """

    accuracy: float
    cost: float
    shares: tuple[float, ...]


def exits_of(confidence: np.ndarray, thresholds: Sequence[float]) -> np.ndarray:
    """The exit that each image leaves at, (N,), from 0; `confidence` is (E, N)."""
    reached = confidence[:-1] >= np.asarray(thresholds)[:, None]
    return np.where(reached.any(axis=0), reached.argmax(axis=0), len(confidence) - 1)


def outcome(
    confidence: np.ndarray, right: np.ndarray, costs: Sequence[float], thresholds: Sequence[float]
) -> Outcome:
    """What `thresholds` come to.

    Args:
      confidence: (E, N) of N images at E exits.
      right: (E, N) bool, whether the image is classified rightly there.
      costs: (E,) of leaving there, cumulative.
    """
    exits = exits_of(confidence, thresholds)
    shares = np.bincount(exits, minlength=len(costs)) / len(exits)
    accuracy = right[exits, np.arange(len(exits))].mean()
    return Outcome(float(accuracy), float(shares @ costs), tuple(map(float, shares)))


def at_random(right: np.ndarray, shares: Sequence[float]) -> float:
    """The accuracy to expect if images leave by lot, `shares` of them at each exit."""
    return float(right.mean(axis=1) @ np.asarray(shares))


def geometric(confidence: np.ndarray, p: float) -> tuple[float, ...]:
    """The thresholds of the official code: a share of the images proportional to p, p², p³ … leaves
    at each exit, those that are most confident there.

    Args:
      confidence: (E, N) of the images to calibrate with.
      p: below 1 more images leave early; the code takes those of `GEOMETRIC`.
    """
    # In float32, as there: rounding decides how many leave.
    powers = np.exp(np.log(np.float32(p)) * np.arange(1, len(confidence) + 1, dtype=np.float32))
    return with_shares(confidence, powers / powers.sum(dtype=np.float32))


def with_shares(confidence: np.ndarray, shares: Sequence[float]) -> tuple[float, ...]:
    """The thresholds that let `shares` of the images, (E,), leave at each exit."""
    count = confidence.shape[1]
    stays, thresholds = np.ones(count, bool), []
    for share, sure in zip(shares[:-1], confidence, strict=False):
        leave = int(np.float32(count) * np.float32(share))
        among = np.sort(sure[stays])[::-1]
        enough = 0 < leave <= len(among)
        thresholds.append(float(among[leave - 1]) if enough else NOBODY)
        stays &= ~(sure >= thresholds[-1])
    return tuple(thresholds)


def solve(
    confidence: np.ndarray, right: np.ndarray, costs: Sequence[float], budgets: Sequence[float]
) -> list[tuple[float, ...]]:
    """The thresholds with the highest accuracy whose mean cost is within each budget (DVT, Eq. 6; the
    paper searches with a genetic algorithm).

    The last threshold is found exactly: every value that makes a difference is tried, given those
    before it. For two exits that is all; for three the first is exact too with up to 4,095 images.
    Beyond that the earlier thresholds are searched on a grid of quantiles, which narrows around the
    best of each budget until neighbouring images are distinguished.

    Args:
      confidence, right, costs: see `outcome`; costs rise.
      budgets: each at least `costs[0]`.
    """
    search = _Search(confidence, right, np.asarray(costs, float))
    earlier = len(costs) - 2
    grid = int(_COMBINATIONS ** (1 / max(earlier, 1)) + 1e-9)
    cuts = [_spread(0, len(places) - 1, grid) for places in search.places[:-1]]
    settings = search.best(cuts, budgets)
    refined = int(_REFINED ** (1 / max(earlier, 1)) + 1e-9)
    for at, budget in enumerate(budgets):
        around = cuts
        while any(np.diff(cut).max(initial=1) > 1 for cut in around):
            around = [
                _spread(*_neighbours(cut, place), refined)
                for cut, place in zip(around, settings[at].places, strict=True)
            ]
            (better,) = search.best(around, [budget])
            settings[at] = max(settings[at], better)
    return [search.thresholds(setting) for setting in settings]


class _Found(NamedTuple):
    """The best setting so far; the greater is the better one."""

    right: int
    saved: float
    places: tuple[int, ...]  # of the earlier thresholds, in `_Search.places`
    last: int  # how many images reach the last threshold, of all


class _Search:
    """Images sorted by confidence at each exit, so that a threshold is how many are above it.

    Attributes:
      places: for each threshold the numbers of images above it that are possible: between images of
        equal confidence there is none.
    """

    def __init__(self, confidence: np.ndarray, right: np.ndarray, costs: np.ndarray):
        early = confidence[:-1]
        self._right, self._costs = right.astype(np.int64), costs
        self._order = np.argsort(-early, axis=1, kind="stable")
        self._sorted = np.take_along_axis(early, self._order, axis=1)
        self._rank = np.argsort(self._order, axis=1, kind="stable")
        count = early.shape[1]
        self.places = [
            np.concatenate([[0], np.flatnonzero(np.diff(row)) + 1, [count]]) for row in self._sorted
        ]
        self._gain = (self._right[-2] - self._right[-1])[self._order[-1]]

    def best(self, cuts: list[np.ndarray], budgets: Sequence[float]) -> list[_Found]:
        """The best setting for each budget.

        Args:
          cuts: of each earlier threshold the indices in `places` to try.
        """
        count = self._right.shape[1]
        best = [_Found(-1, 0.0, (0,) * len(cuts), 0)] * len(budgets)
        ends = self.places[-1]
        for places in itertools.product(*cuts):
            stays, total, cost = self._after(places)
            staying = stays[self._order[-1]]
            left = np.concatenate([[0], np.cumsum(staying)])[ends]
            gained = np.concatenate([[0], np.cumsum(self._gain * staying)])[ends]
            total += self._right[-1][stays].sum()
            # Falls as more leave.
            costs = cost + stays.sum() * self._costs[-1]
            costs = costs - left * (self._costs[-1] - self._costs[-2])
            for at, budget in enumerate(budgets):
                allowed = budget * count * (1 + 1e-12)
                first = int(np.searchsorted(-costs, -allowed))
                if first == len(ends):
                    continue
                # Of equal ones the last, which is the cheapest.
                end = len(ends) - 1 - int(gained[first:][::-1].argmax())
                candidate = _Found(
                    int(total + gained[end]), -float(costs[end]), places, int(ends[end])
                )
                best[at] = max(best[at], candidate)
        return best

    def thresholds(self, setting: _Found) -> tuple[float, ...]:
        """The values of a setting."""
        above = [places[at] for places, at in zip(self.places, setting.places, strict=False)]
        pairs = zip(self._sorted, [*above, setting.last], strict=True)
        return tuple(float(row[n - 1]) if n else NOBODY for row, n in pairs)

    def _after(self, places: tuple[int, ...]) -> tuple[np.ndarray, int, float]:
        """Which images (N,) reach the last threshold; and of the others how many are right where they
        left, and the sum of their costs.
        """
        stays = np.ones(self._right.shape[1], bool)
        right, cost = 0, 0.0
        for exit, place in enumerate(places):
            leaves = stays & (self._rank[exit] < self.places[exit][place])
            right += int(self._right[exit][leaves].sum())
            cost += float(leaves.sum() * self._costs[exit])
            stays &= ~leaves
        return stays, right, cost


def _spread(first: int, last: int, number: int) -> np.ndarray:
    """Up to `number` whole numbers from `first` to `last`, evenly spaced."""
    return np.unique(np.linspace(first, last, min(number, last - first + 1)).round().astype(int))


def _neighbours(cut: np.ndarray, place: int) -> tuple[int, int]:
    """The numbers of `cut` before and after `place`."""
    at = int(np.searchsorted(cut, place))
    return int(cut[max(at - 1, 0)]), int(cut[min(at + 1, len(cut) - 1)])
