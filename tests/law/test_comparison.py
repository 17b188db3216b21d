"""The statistics by which two samples are said to be of the same law, on samples of known laws."""

import numpy as np
import pytest
import scipy.stats

from tests.law import comparison


def curves(seed: int, shift: float = 0.0, spread: float = 1.0) -> dict[str, np.ndarray]:
    """Five runs whose accuracy scatters by half a point."""
    random = np.random.default_rng(seed)
    rise = np.linspace(0.3, 0.9, comparison.TENTHS)
    noise = 0.005 * spread * random.standard_normal((5, comparison.TENTHS))
    return {"accuracy": rise + shift + noise}


def verdicts(ours: dict, theirs: dict) -> list[bool]:
    checks = comparison.compare_curves(ours, theirs, judge="accuracy", percent=True)
    return [check.holds for check in checks]


def test_curves_of_one_law_hold():
    assert verdicts(curves(0), curves(1)) == [True, True, True]


def test_two_points_at_every_tenth_are_found_in_the_last_value_and_in_the_tenths():
    assert verdicts(curves(0, shift=0.02), curves(1)) == [False, True, False]


def test_a_difference_of_one_tenth_is_found():
    ours = curves(0)
    ours["accuracy"][:, 4] += 0.03
    assert verdicts(ours, curves(1)) == [True, True, False]


def test_a_small_difference_of_the_same_sign_everywhere_is_found():
    ours = curves(1)
    ours["accuracy"] += 0.001
    assert verdicts(ours, curves(1)) == [True, True, False]


def test_another_spread_over_seeds_is_found():
    assert verdicts(curves(0, spread=20), curves(1))[1] is False


def test_a_difference_within_two_errors_of_very_noisy_runs_is_too_large():
    assert verdicts(curves(0, shift=0.04, spread=10), curves(1, spread=10))[0] is False


def test_standard_errors_are_those_of_welchs_test():
    random = np.random.default_rng(0)
    a, b = random.normal(0, 1, (5, 3)), random.normal(0, 3, (7, 3))
    expected = scipy.stats.ttest_ind(a, b, equal_var=False).statistic
    np.testing.assert_allclose((a.mean(0) - b.mean(0)) / comparison.standard_error(a, b), expected)


def test_one_in_a_hundred_ratios_of_variances_of_one_law_is_outside():
    low, high = comparison.variance_ratios(5, 5)
    assert high == pytest.approx(23.155, abs=0.001)  # the table of F with 4 and 4 degrees, 0.5 %
    assert low == pytest.approx(1 / high)
    samples = np.random.default_rng(0).standard_normal((2, 50_000, 5)).var(axis=2, ddof=1)
    ratios = samples[0] / samples[1]
    assert np.mean((ratios < low) | (ratios > high)) == pytest.approx(0.01, abs=0.0015)


def test_draws_of_one_law_hold_and_a_shift_is_found_after_bonferroni():
    random = np.random.default_rng(0)
    ours = {"area": random.uniform(size=10_000), "aspect": random.normal(size=10_000)}
    theirs = {"area": random.uniform(size=10_000), "aspect": random.normal(0.1, 1, 10_000)}
    same, shifted = comparison.compare_draws(ours, theirs)
    assert (same.holds, shifted.holds) == (True, False)
    assert same.bound == f"p > {comparison.LEVEL / 2:.1g}"


def test_a_check_says_how_it_fails_and_equal_engines_fail_twice_in_the_same_way_in_two_of_a_thousand_curves():
    ours = curves(0)
    ours["accuracy"][:, [2, 9]] += ([0.03, -0.03],)
    assert comparison.compare_curves(ours, curves(1), judge="accuracy", percent=True)[2].failed == (
        "tenth 3 above", "tenth 10 below",
    )  # fmt: skip
    # A tenth alone is outside 3 standard errors by the t distribution of 8 degrees of freedom, not the normal law.
    outside = 2 * scipy.stats.t(8).sf(3)
    samples = np.random.default_rng(0).standard_normal((2, 100_000, 5))
    away = np.diff(samples.mean(2), axis=0)[0] / np.sqrt(samples.var(2, ddof=1).sum(0) / 5)
    assert np.mean(np.abs(away) > 3) == pytest.approx(outside, rel=0.1)
    assert 1 - (1 - outside) ** comparison.TENTHS == pytest.approx(0.158, abs=0.001)
    assert comparison.TENTHS * outside**2 / 2 == pytest.approx(0.0015, abs=0.0001)
