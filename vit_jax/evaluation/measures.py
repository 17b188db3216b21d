"""How good and how honest the probabilities of a classifier are, from its logits: NumPy, in float64.

Logits (n, classes) and targets (n, classes), 1 for an example's class, or classes, and 0 for the others.
Probabilities are softmax's, or where the model is trained so, sigmoid's: then every class is a question of its
own, and likelihoods are of all their answers.
"""

from typing import NamedTuple

import numpy as np
import scipy.special

BINS = 15
_ROWS = 256  # copied at a time, in float64
_LOG_TEMPERATURES = (-5.0, 5.0)


class Bins(NamedTuple):
    """Examples by how confident the model is of its best class; (bins,) each.

    Attributes:
      count: examples whose confidence is above b / bins and at most (b + 1) / bins.
      confidence, accuracy: their means; 0 where there are none.
    """

    count: np.ndarray
    confidence: np.ndarray
    accuracy: np.ndarray


def probabilities(logits: np.ndarray, kind: str) -> np.ndarray:
    """(n, classes) by 'softmax' or 'sigmoid'."""
    logits = np.asarray(logits, np.float64)
    return scipy.special.expit(logits) if kind == "sigmoid" else scipy.special.softmax(logits, -1)


def negative_log_likelihood(logits: np.ndarray, targets: np.ndarray, kind: str) -> float:
    """The mean over examples."""
    return float(np.mean(_log_partition(logits, kind)) - _of_targets(logits, targets))


def brier_score(probabilities: np.ndarray, targets: np.ndarray) -> float:
    """The mean over examples of the squared distance from the targets, summed over classes (Brier 1950)."""
    return float(np.mean(np.square(probabilities - targets).sum(-1)))


def bins_of(probabilities: np.ndarray, targets: np.ndarray, count: int = BINS) -> Bins:
    """Examples in bins of equal width of the best class's probability."""
    best = probabilities.argmax(-1)
    confidence = np.take_along_axis(probabilities, best[:, None], 1)[:, 0]
    right = np.take_along_axis(targets, best[:, None], 1)[:, 0]
    number = np.clip(np.ceil(confidence * count).astype(int) - 1, 0, count - 1)
    counts = np.bincount(number, minlength=count)
    sums = (np.bincount(number, values, minlength=count) for values in (confidence, right))
    return Bins(counts, *(total / np.maximum(counts, 1) for total in sums))


def calibration_error(bins: Bins) -> float:
    """Expected calibration error: Σ (n_b / n) |accuracy - confidence| (Guo et al., arXiv 1706.04599 §2)."""
    gaps = np.abs(bins.accuracy - bins.confidence)
    return float(np.sum(bins.count * gaps) / max(bins.count.sum(), 1))


def fit_temperature(logits: np.ndarray, targets: np.ndarray, kind: str) -> float:
    """The number to divide logits by that makes the targets likeliest, between e^-5 and e^5 (arXiv 1706.04599
    §4.2).
    """
    import scipy.optimize  # takes over a second, and only this function needs it

    of_targets = _of_targets(logits, targets)
    minimum = scipy.optimize.minimize_scalar(
        lambda t: np.mean(_log_partition(logits, kind, np.exp(-t))) - of_targets * np.exp(-t),
        bounds=_LOG_TEMPERATURES,
        method="bounded",
        options={"xatol": 1e-7},
    )
    return float(np.exp(minimum.x))


def interval(right: float, total: int, z: float = 1.959964) -> tuple[float, float]:
    """Bounds of a share, `right` of `total`, that hold in 95 % of samples (Wilson 1927)."""
    share, spread = right / total, z * z / total
    middle = share + spread / 2
    half = z * np.sqrt(share * (1 - share) / total + spread / (4 * total))
    return float((middle - half) / (1 + spread)), float((middle + half) / (1 + spread))


def confusion(truth: np.ndarray, predicted: np.ndarray, classes: int) -> np.ndarray:
    """(classes, classes) counts, a row for each true class and a column for each predicted one."""
    pairs = truth.astype(np.int64) * classes + predicted
    return np.bincount(pairs, minlength=classes**2).reshape(classes, classes)


def by_class(confusion: np.ndarray) -> dict[str, np.ndarray]:
    """`examples` of each class, and its `rates`, (classes,)."""
    true = confusion.sum(1)
    return {"examples": true} | rates(np.diag(confusion), confusion.sum(0), true)


def rates(right: np.ndarray, predicted: np.ndarray, true: np.ndarray) -> dict[str, np.ndarray]:
    """`precision`, `recall` and `f1`; 0 where one divides by nothing.

    Args:
      right: how many images of a class have it as an answer, in any shape; as the other two.
      predicted: how many images have the class as an answer.
      true: how many are of the class.
    """
    return {
        "precision": right / np.maximum(predicted, 1),
        "recall": right / np.maximum(true, 1),
        "f1": 2 * right / np.maximum(true + predicted, 1),
    }


class Ranking(NamedTuple):
    """How well scores rank the examples of each class before the rest; (classes,) each.

    Attributes:
      average_precision: the mean of the precisions at the examples of the class; NaN without examples.
      auc: area under the ROC curve, the share of pairs of an example and an image of other classes whose scores are in
        this order, a tie counting as a half; NaN if all images are of the class, or none is.
    """

    average_precision: np.ndarray
    auc: np.ndarray


def ranking(scores: np.ndarray, targets: np.ndarray) -> Ranking:
    """Images of equal score are ranked together; (n, classes) each."""
    precisions = np.full(scores.shape[1], np.nan)
    areas = np.full(scores.shape[1], np.nan)
    for c in np.flatnonzero(targets.any(0)):
        order = np.argsort(-scores[:, c], kind="stable")
        ranked = scores[order, c]
        hits = np.cumsum(targets[order, c])
        ends = ends_of_ties(ranked)
        gained = np.diff(hits[ends], prepend=0)
        precisions[c] = np.sum(gained * hits[ends] / (ends + 1)) / hits[-1]
        misses = ends + 1 - hits[ends]
        if misses[-1]:
            # Each miss ranks below the hits of earlier ties, and below half of the hits in its tie.
            above = hits[ends] - gained / 2
            areas[c] = np.sum(np.diff(misses, prepend=0) * above) / hits[-1] / misses[-1]
    return Ranking(precisions, areas)


def ends_of_ties(ranked: np.ndarray) -> np.ndarray:
    """The index of the last score in each run of equal scores. The scores are in order."""
    return np.append(np.flatnonzero(ranked[1:] != ranked[:-1]), len(ranked) - 1)


def _of_targets(logits: np.ndarray, targets: np.ndarray) -> float:
    """The mean over examples of the sum of the logits of their classes."""
    return float(np.mean(np.sum(logits * targets, axis=-1, dtype=np.float64)))


def _log_partition(logits: np.ndarray, kind: str, scale: float = 1.0) -> np.ndarray:
    """The logarithm of what the probabilities of `scale * logits` are divided by, (n,) float64."""
    logsumexp = np.empty(len(logits))
    for start in range(0, len(logits), _ROWS):
        rows = slice(start, start + _ROWS)
        x = logits[rows] * np.float64(scale)
        if kind == "sigmoid":
            logsumexp[rows] = np.logaddexp(0, x).sum(-1)
        else:
            top = x.max(-1)
            np.exp(x - top[:, None], out=x)
            logsumexp[rows] = np.log(x.sum(-1)) + top
    return logsumexp
