"""Measures against torchmetrics and netcal, where these are installed: ties, empty classes, one class."""

import numpy as np
import pytest

from tests import lazily
from vit_jax.evaluation import measures

torch = lazily.Package("torch")
theirs = lazily.Package("torchmetrics.functional.classification")

pytestmark = pytest.mark.slow
BOUND = 1e-6


def drawn(case: str) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities (n, classes) and labels (n,) of a case."""
    random = np.random.default_rng(3)
    classes = {"one class": 1, "two classes": 2}.get(case, 9)
    logits = 3 * random.normal(size=(500, classes))
    if case == "ties":
        logits = np.round(logits)  # many rows have several best classes
    probabilities = measures.probabilities(logits, "softmax")
    there = max(classes - 3, 1) if case == "empty classes" else classes
    guessed = random.integers(0, there, 500)
    return probabilities, np.where(
        random.random(500) < 0.5, probabilities.argmax(-1) % there, guessed
    )


CASES = ("all classes", "ties", "empty classes", "two classes", "one class")


@pytest.mark.parametrize("case", CASES)
def test_confusion_and_rates_are_those_of_torchmetrics(case):
    probabilities, labels = drawn(case)
    classes, best = probabilities.shape[1], probabilities.argmax(-1)
    pairs = measures.confusion(labels, best, classes)
    found = measures.by_class(pairs)
    if classes == 1:  # which torchmetrics does not take: everything is right
        assert pairs == [[500]] and found["f1"] == found["precision"] == found["recall"] == [1]
        return
    given = torch.tensor(best), torch.tensor(labels)
    expected = theirs.multiclass_confusion_matrix(*given, num_classes=classes)
    np.testing.assert_array_equal(pairs, expected)
    for name in ("precision", "recall", "f1_score"):
        of_classes = getattr(theirs, f"multiclass_{name}")(
            *given, num_classes=classes, average=None
        )
        np.testing.assert_allclose(found[name.removesuffix("_score")], of_classes, atol=BOUND)


@pytest.mark.parametrize("case", CASES)
def test_calibration_error_is_that_of_torchmetrics_and_netcal(case):
    netcal = pytest.importorskip("netcal.metrics")
    probabilities, labels = drawn(case)
    classes = probabilities.shape[1]
    targets = labels[:, None] == np.arange(classes)
    found = measures.calibration_error(measures.bins_of(probabilities, targets))
    best = probabilities.max(-1)
    right = np.take_along_axis(targets, probabilities.argmax(-1)[:, None], 1)[:, 0]
    # Of a binary question they bin the answer's probability: whether the best class is right.
    assert found == pytest.approx(
        netcal.ECE(measures.BINS).measure(best, right.astype(int)), abs=BOUND
    )
    if classes > 1:
        given = torch.tensor(probabilities), torch.tensor(labels)
        expected = theirs.multiclass_calibration_error(
            *given, num_classes=classes, n_bins=measures.BINS, norm="l1"
        )
        assert found == pytest.approx(float(expected), abs=BOUND)


@pytest.mark.parametrize("case", CASES)
def test_average_precision_is_that_of_torchmetrics(case):
    scores, _ = drawn(case)
    several = np.random.default_rng(4).random(scores.shape) < 0.2
    if case == "empty classes":
        several[:, [1, 5]] = False
    found = measures.ranking(scores, several).average_precision
    given = torch.tensor(scores), torch.tensor(several.astype(int))
    if scores.shape[1] == 1:
        expected = theirs.binary_average_precision(given[0][:, 0], given[1][:, 0])[None]
    else:
        expected = theirs.multilabel_average_precision(
            *given, num_labels=scores.shape[1], average=None, thresholds=None
        )
    # They give a class without examples 0, and warn; ours leaves it out of the mean.
    np.testing.assert_allclose(np.nan_to_num(found), expected, atol=BOUND)
    assert np.isnan(found).sum() == (2 if case == "empty classes" else 0)
