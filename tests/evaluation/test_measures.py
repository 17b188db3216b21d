"""Measures of classifiers against scikit-learn and plain loops, ties and empty classes included."""

import math

import numpy as np
import pytest
import scipy.stats
from sklearn import metrics

from vit_jax.evaluation import measures

RANDOM = np.random.default_rng(0)
CLASSES = 7
LOGITS = RANDOM.normal(size=(400, CLASSES)).astype(np.float32) * 2
# Class 6 has no example.
LABELS = np.where(RANDOM.random(400) < 0.6, LOGITS.argmax(-1), RANDOM.integers(0, 6, 400)) % 6
TARGETS = LABELS[:, None] == np.arange(CLASSES)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_likelihood_and_brier_score_are_those_of_scikit_learn(kind):
    likely = measures.probabilities(LOGITS, kind)
    nll = measures.negative_log_likelihood(LOGITS, TARGETS, kind)
    if kind == "softmax":
        expected = metrics.log_loss(LABELS, likely, labels=range(CLASSES))
        brier = metrics.brier_score_loss(TARGETS.astype(int), likely, scale_by_half=False)
    else:
        answers = zip(TARGETS.T, likely.T, strict=True)
        expected = sum(metrics.log_loss(t, p, labels=[False, True]) for t, p in answers)
        brier = sum(np.mean((p - t) ** 2) for t, p in zip(TARGETS.T, likely.T, strict=True))
    assert nll == pytest.approx(expected, rel=1e-9)
    assert measures.brier_score(likely, TARGETS) == pytest.approx(brier, rel=1e-9)


def test_calibration_error_is_the_sum_over_bins():
    likely = measures.probabilities(LOGITS, "softmax")
    likely[0] = [1, 0, 0, 0, 0, 0, 0]  # the end of the last bin
    likely[1] = [0.6, 0.4, 0, 0, 0, 0, 0]  # the end of the ninth
    found = measures.bins_of(likely, TARGETS)
    error = 0.0
    for b in range(15):
        inside = [i for i in range(400) if b / 15 < max(likely[i]) <= (b + 1) / 15]
        assert found.count[b] == len(inside)
        if inside:
            right = sum(int(np.argmax(likely[i])) == LABELS[i] for i in inside)
            sure = math.fsum(max(likely[i]) for i in inside)
            error += abs(right - sure) / 400
    assert measures.calibration_error(found) == pytest.approx(error, rel=1e-12)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_the_temperature_undoes_what_logits_were_multiplied_with(kind):
    found = measures.fit_temperature(LOGITS, TARGETS, kind)
    assert measures.fit_temperature(LOGITS * 3, TARGETS, kind) == pytest.approx(3 * found, rel=1e-5)
    best = measures.negative_log_likelihood(LOGITS / found, TARGETS, kind)
    for near in (0.99, 1.01):
        assert measures.negative_log_likelihood(LOGITS / found / near, TARGETS, kind) > best


def test_interval_is_wilson_s():
    for right, total in ((0, 5), (3, 5), (5, 5), (760, 1000)):
        expected = scipy.stats.binomtest(right, total).proportion_ci(method="wilson")
        np.testing.assert_allclose(measures.interval(right, total), list(expected), atol=1e-7)


def test_confusion_and_its_rates_are_those_of_scikit_learn():
    predicted = LOGITS.argmax(-1)
    pairs = measures.confusion(LABELS, predicted, CLASSES)
    np.testing.assert_array_equal(
        pairs, metrics.confusion_matrix(LABELS, predicted, labels=range(CLASSES))
    )
    found = measures.by_class(pairs)
    expected = metrics.precision_recall_fscore_support(
        LABELS, predicted, labels=range(CLASSES), zero_division=0
    )
    for name, values in zip(("precision", "recall", "f1", "examples"), expected, strict=True):
        np.testing.assert_allclose(found[name], values, atol=1e-12)


def test_average_precision_is_that_of_scikit_learn_with_ties():
    scores = np.round(LOGITS, 1)
    several = RANDOM.random((400, CLASSES)) < 0.2
    several[:, 3] = False
    found = measures.ranking(scores, several).average_precision
    assert np.isnan(found[3])
    there = np.delete(np.arange(CLASSES), 3)
    expected = [metrics.average_precision_score(several[:, c], scores[:, c]) for c in there]
    np.testing.assert_allclose(found[there], expected, atol=1e-12)


def test_one_class_and_one_example_have_measures_too():
    likely = measures.probabilities(np.zeros((1, 1)), "softmax")
    truth = np.ones((1, 1), bool)
    assert measures.calibration_error(measures.bins_of(likely, truth)) == 0
    assert measures.by_class(measures.confusion(np.zeros(1, int), np.zeros(1, int), 1))["f1"] == [1]
    assert measures.ranking(likely, truth).average_precision == [1]
