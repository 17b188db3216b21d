"""The statistics by which two samples are said to be of the same distribution, on samples of known distributions."""

import numpy as np
import pytest
import scipy.stats

from tests.parity import comparison


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


def test_a_check_says_in_which_tenths_and_directions_it_fails():
    ours = curves(0)
    ours["accuracy"][:, [2, 9]] += 0.03, -0.03
    checks = comparison.compare_curves(ours, curves(1), judge="accuracy", percent=True)
    assert checks[2].failed == ("tenth 3 above", "tenth 10 below")


@pytest.mark.parametrize(
    "correlation, outside, twice, same_way", [(0.0, 0.160, 0.026, 0.0016), (0.7, 0.214, 0.045, 0.0075)]
)  # fmt: skip
def test_of_equal_engines_one_curve_in_six_fails_and_few_fail_twice_in_the_same_way(
    correlation, outside, twice, same_way
):
    """docs/fidelity.md has these shares, for such correlations of neighbouring tenths."""
    tenths = np.arange(comparison.TENTHS)
    mixing = np.linalg.cholesky(correlation ** np.abs(tenths[:, None] - tenths))
    random = np.random.default_rng(0)

    def away():
        samples = random.standard_normal((2, 5, 20_000, comparison.TENTHS)) @ mixing.T
        errors = comparison.standard_error(*samples)
        return (samples[0].mean(0) - samples[1].mean(0)) / errors

    first, second = (
        np.concatenate([x > 3, x < -3, (x > 0).all(1)[:, None], (x < 0).all(1)[:, None]], axis=1)
        for x in (away(), away())
    )
    assert first.any(1).mean() == pytest.approx(outside, abs=0.008)
    assert (first.any(1) & second.any(1)).mean() == pytest.approx(twice, abs=0.004)
    assert (first & second).any(1).mean() == pytest.approx(same_way, abs=0.002)
