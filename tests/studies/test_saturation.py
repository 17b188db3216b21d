"""The law of accuracy against compute: found again from its own points, and never worse than SciPy's fit of all four
numbers at once.
"""

import numpy as np
import scipy.optimize

from tests.studies.test_report import made_up
from vit_jax.studies import compare, report, runs, saturation

LAW = saturation.Law(0.6, 0.4, 0.12, 0.03, 0.0)  # as large as Scaling ViT's figure of ImageNet


def law(compute, a, b, c, d):
    return a * (compute + d) ** -b + c


def test_a_law_is_found_again_from_its_own_points():
    compute = np.geomspace(1e-2, 1e3, 9)
    found = saturation.fit(compute, law(compute, *LAW[:4]))
    np.testing.assert_allclose(found[:4], LAW[:4], rtol=1e-3)
    assert found.residual < 1e-6
    assert saturation.fit(compute[:4], compute[:4]) is None


def test_no_fit_of_all_four_numbers_is_closer():
    random = np.random.default_rng(0)
    compute = np.geomspace(1e-2, 1e3, 8)
    error = law(compute, *LAW[:4]) + 0.01 * random.standard_normal(8)
    found = saturation.fit(compute, error)
    bounds = ([0] * 4, [np.inf, 10, 1, np.inf])
    theirs, _ = scipy.optimize.curve_fit(law, compute, error, LAW[:4], bounds=bounds, maxfev=20_000)
    squares = [((law(compute, *numbers) - error) ** 2).sum() for numbers in (found[:4], theirs)]
    assert squares[0] <= squares[1] * (1 + 1e-6)


def test_reports_have_the_law_of_a_family_with_enough_settings(tmp_path):
    for depth in range(1, 7):
        work = 4.0**depth
        fields = {"model.depth": depth}
        accuracy = 1 - law(20 * 2.0 * work * 25e15 / 1e18, *LAW[:4])
        made_up(tmp_path / str(depth), fields, accuracy, model_flops_per_second=work * 25e15)
    comparison = compare.compare(runs.find_runs([tmp_path]))
    head, (name, settings, *numbers) = saturation.law_rows(comparison)
    assert (name, settings, numbers[3]) == ("vit", "6", "12.00 %")
    assert "Wrong answers against compute" in report._markdown(comparison, {})
    assert saturation.frontier([(3, 0.4), (1, 0.5), (2, 0.6), (4, 0.3)]) == [
        (1, 0.5),
        (3, 0.4),
        (4, 0.3),
    ]
