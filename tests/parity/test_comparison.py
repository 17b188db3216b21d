"""The rule by which two samples are said to differ, on samples of known distributions."""

import json

import numpy as np
import pytest
import scipy.stats

from tests.parity import comparison, rows


def curves(seed: int, shift: float = 0.0, runs: int = 10) -> np.ndarray:
    """(runs, TENTHS) of an accuracy that scatters by half a point."""
    random = np.random.default_rng(seed)
    rise = np.linspace(0.3, 0.9, comparison.TENTHS)
    return rise + shift + 0.005 * random.standard_normal((runs, comparison.TENTHS))


def test_the_two_numbers_are_the_last_tenth_and_the_mean_of_all_by_welchs_test():
    ours, theirs = curves(0), 3 * curves(1, runs=7)
    end, area = comparison.differences("row", ours, theirs)
    expected = scipy.stats.ttest_ind(ours[:, -1], theirs[:, -1], equal_var=False)
    assert end.p_value == pytest.approx(expected.pvalue)
    assert (end.ours - end.theirs) / end.error == pytest.approx(expected.statistic)
    expected = scipy.stats.ttest_ind(ours.mean(1), theirs.mean(1), equal_var=False)
    assert area.p_value == pytest.approx(expected.pvalue)
    assert (end.number, area.number, end.seeds) == ("end", "area", 7)


def test_a_correction_is_holms_and_tests_that_were_not_made_count():
    random = np.random.default_rng(0)
    for _ in range(200):
        made = random.uniform(size=12) ** 6
        tests = 12 + int(random.integers(0, 7))
        order = np.argsort(made)
        adjusted = np.maximum.accumulate(made[order] * (tests - np.arange(12)))
        expected = np.empty(12, bool)
        expected[order] = adjusted <= comparison.LEVEL
        assert comparison.rejected(made, tests) == expected.tolist()


def test_a_table_of_equal_engines_calls_a_row_different_in_one_of_twenty():
    random = np.random.default_rng(0)
    samples = random.standard_normal((4_000, 9, 2, 10, comparison.TENTHS))
    numbers = np.stack(
        [samples[..., -1], samples.mean(-1)], axis=2
    )  # table, row, number, engine, seed
    ours, theirs = numbers[..., 0, :], numbers[..., 1, :]
    p_values = scipy.stats.ttest_ind(ours, theirs, axis=-1, equal_var=False).pvalue
    called = [any(comparison.rejected(table, tests=18)) for table in p_values.reshape(-1, 18)]
    assert np.mean(called) == pytest.approx(0.05, abs=0.01)


def test_the_page_says_which_differences_ten_seeds_find():
    strictest = comparison.smallest_seen(10, comparison.LEVEL / 18)
    assert strictest == pytest.approx(2.0, abs=0.05)
    assert comparison.smallest_seen(10, comparison.LEVEL) == pytest.approx(1.3, abs=0.05)
    random = np.random.default_rng(0)
    samples = random.standard_normal((2, 10, 20_000))
    samples[0] += strictest
    p_values = scipy.stats.ttest_ind(*samples, equal_var=False).pvalue
    assert np.mean(p_values < comparison.LEVEL / 18) == pytest.approx(comparison.POWER, abs=0.02)


def test_two_points_are_found_among_rows_and_no_row_is_blamed_for_another(tmp_path):
    family = ["plain", "huggingface", "deit", "deit3"]
    for index, name in enumerate(family[:3]):  # the fourth has not been run
        write(tmp_path, name, "ours", curves(index, shift=0.02 if name == "deit" else 0.0))
        write(tmp_path, name, "theirs", curves(100 + index))
    judged = rows.judge(family, tmp_path)
    assert {x.row for x, differs in judged if differs} == {"deit"}
    assert [x.row for x, _ in judged] == [name for name in family[:3] for _ in range(2)]


def write(folder, row: str, engine: str, accuracies: np.ndarray) -> None:
    with (folder / f"{row}.jsonl").open("a") as file:
        for seed, values in enumerate(accuracies):
            curves = {"accuracy": values.tolist()}
            line = {"engine": engine, "seed": seed, "curves": curves}
            file.write(json.dumps(line) + "\n")


def test_draws_of_one_distribution_hold_and_a_shift_is_found_after_bonferroni():
    random = np.random.default_rng(0)
    ours = {"area": random.uniform(size=10_000), "aspect": random.normal(size=10_000)}
    theirs = {"area": random.uniform(size=10_000), "aspect": random.normal(0.1, 1, 10_000)}
    same, shifted = comparison.compare_draws(ours, theirs)
    assert (same.differs, shifted.differs) == (False, True)
    assert same.bound == comparison.LEVEL_OF_DRAWS / 2
