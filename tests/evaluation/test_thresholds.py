"""Thresholds of early exits: against the official code, and against trying everything."""

import itertools

import numpy as np
import pytest

from vit_jax.evaluation.early_exit import thresholds

COSTS = (0.5, 1.5, 3.5)


def made_up(images, exits, seed=0, ties=False):
    """Confidences and whether images are right, which is likelier later and if confident."""
    random = np.random.default_rng(seed)
    confidence = random.beta(2, 2, (exits, images)).astype(np.float32)
    confidence = confidence.round(1) if ties else confidence
    helps = np.linspace(0, 0.3, exits)[:, None]
    return confidence, random.uniform(size=(exits, images)) < 0.2 + 0.5 * confidence + helps


def every_setting(confidence):
    return itertools.product(*([thresholds.NOBODY, *np.unique(row)] for row in confidence[:-1]))


def test_the_shares_of_the_official_code_give_its_thresholds_and_its_outcome(shared_data):
    with np.load(shared_data / "oracle/relatives/dvt_thresholds.io.npz") as file:
        oracle = dict(file)
    probabilities, labels = oracle["probabilities"], oracle["labels"]
    confidence, right = probabilities.max(-1), probabilities.argmax(-1) == labels
    half = len(labels) // 2
    found = [thresholds.geometric(confidence[:, :half], p) for p in thresholds.GEOMETRIC]
    np.testing.assert_array_equal(found, oracle["thresholds"][:, :2])
    outcomes = [
        thresholds.outcome(confidence[:, half:], right[:, half:], (0.47, 1.46, 3.5), one)
        for one in found
    ]
    np.testing.assert_allclose([100 * o.accuracy for o in outcomes], oracle["accuracy"], rtol=1e-6)
    np.testing.assert_allclose([o.cost for o in outcomes], oracle["cost"], rtol=1e-5)


def test_shares_too_small_for_one_image_let_nobody_leave():
    confidence, _ = made_up(5, 3)
    assert thresholds.geometric(confidence, 59 / 20)[0] == thresholds.NOBODY


@pytest.mark.parametrize(
    ("images", "exits", "ties"), [(200, 2, False), (200, 2, True), (40, 3, False), (60, 3, True)]
)
def test_no_setting_within_the_budget_is_better_than_the_solver(images, exits, ties):
    confidence, right = made_up(images, exits, ties=ties)
    costs = COSTS[:exits]
    budgets = np.linspace(costs[0], costs[-1], 7)
    found = [
        thresholds.outcome(confidence, right, costs, one)
        for one in thresholds.solve(confidence, right, costs, budgets)
    ]
    tried = [thresholds.outcome(confidence, right, costs, one) for one in every_setting(confidence)]
    for budget, one in zip(budgets, found, strict=True):
        assert one.cost <= budget * (1 + 1e-9)
        assert one.accuracy == max(t.accuracy for t in tried if t.cost <= budget * (1 + 1e-9))


def test_a_grid_that_narrows_comes_near_the_best(monkeypatch):
    confidence, right = made_up(400, 3)
    budgets = (0.8, 1.5, 2.5)
    exact = thresholds.solve(confidence, right, COSTS, budgets)
    monkeypatch.setattr(thresholds, "_COMBINATIONS", 20)
    monkeypatch.setattr(thresholds, "_REFINED", 8)
    for one, best in zip(thresholds.solve(confidence, right, COSTS, budgets), exact, strict=True):
        near, most = (thresholds.outcome(confidence, right, COSTS, t) for t in (one, best))
        assert most.accuracy - 0.01 <= near.accuracy <= most.accuracy


def test_four_exits_beat_the_official_shares_within_their_own_cost():
    confidence, right = made_up(2000, 4, seed=1)
    costs = (0.3, 0.8, 1.7, 3.5)
    shares = [thresholds.geometric(confidence, p) for p in (0.5, 1.0, 2.0)]
    rivals = [thresholds.outcome(confidence, right, costs, one) for one in shares]
    solved = thresholds.solve(confidence, right, costs, [rival.cost for rival in rivals])
    for one, rival in zip(solved, rivals, strict=True):
        found = thresholds.outcome(confidence, right, costs, one)
        assert found.accuracy > rival.accuracy and found.cost <= rival.cost * (1 + 1e-9)


def test_images_leave_by_lot_with_the_mean_of_the_exits():
    right = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1]], bool)
    assert thresholds.at_random(right, (0.5, 0.25, 0.25)) == 0.5
