"""Whether two samples are of the same distribution: curves of several seeds, and statistics of many images."""

import dataclasses

import numpy as np
import scipy.stats

TENTHS = 10
POINTS = 1.5  # most by which the means of the last evaluation may differ, in points of %
LEVEL = 0.001  # of the Kolmogorov-Smirnov tests of a row together


@dataclasses.dataclass(frozen=True)
class Check:
    """What was compared.

    Attributes:
      name: of what.
      seen: what was seen.
      bound: what is allowed.
      failed: how it is not so, such as 'tenth 3 above'; of equal engines the same fails twice in a thousand curves.
    """

    name: str
    seen: str
    bound: str
    failed: tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether all is within the bound."""
        return not self.failed


def compare_curves(ours: dict, theirs: dict, *, judge: str, percent: bool) -> list[Check]:
    """Compares the curves of two engines.

    Args:
      ours, theirs: (seeds, `TENTHS`) by the name of a quantity.
      judge: the quantity whose last value is the result of a run.
      percent: whether it is a share, whose means may differ by `POINTS` of %.

    Returns:
      Checks of the last value's mean and variance, and of the mean of each tenth of each quantity.
    """
    last, other = ours[judge][:, -1], theirs[judge][:, -1]
    difference, error = last.mean() - other.mean(), standard_error(last, other)
    scale, digits = (100, 2) if percent else (1, 4)
    shown = [f"{scale * x:.{digits}f}" for x in (last.mean(), other.mean(), difference, error)]
    small = not percent or abs(scale * difference) <= POINTS
    points = f" and {POINTS} points" if percent else ""
    low, high = variance_ratios(len(last), len(other))
    ratio = last.var(ddof=1) / other.var(ddof=1)
    checks = [
        Check(
            f"{judge} at the end",
            f"{shown[0]} - {shown[1]} = {shown[2]}, standard error {shown[3]}",
            f"2 standard errors{points}",
            () if abs(difference) <= 2 * error and small else (_side(difference),),
        ),
        Check(
            f"{judge} over seeds, ratio of variances",
            f"{ratio:.2f}",
            f"{low:.3f} to {high:.1f} (F, 1 %)",
            () if low <= ratio <= high else (_side(ratio - 1),),
        ),
    ]
    for name in ours:
        errors = standard_error(ours[name], theirs[name])
        away = (ours[name].mean(0) - theirs[name].mean(0)) / errors
        checks.append(
            Check(
                f"{name}, each tenth, in standard errors",
                " ".join(f"{x:+.1f}" for x in away),
                "3, signs change",
                _failed_tenths(away),
            )
        )
    return checks


def describe_curves(curves: dict) -> str:
    """The means over seeds of each tenth, and what they scatter by, of (seeds, `TENTHS`) by name."""
    lines = []
    for name, values in curves.items():
        means = zip(values.mean(0), values.std(0, ddof=1), strict=True)
        lines.append(f"{name}: " + ", ".join(f"{m:.3f} ± {s:.3f}" for m, s in means))
    return "\n".join(lines)


def compare_draws(ours: dict, theirs: dict) -> list[Check]:
    """Compares samples by the name of a quantity, each (draws,), by Kolmogorov-Smirnov with Bonferroni's bound."""
    checks = []
    for name in ours:
        test = scipy.stats.ks_2samp(ours[name], theirs[name])
        means = f"means {ours[name].mean():.4g} and {theirs[name].mean():.4g}"
        bound = LEVEL / len(ours)
        seen = f"{means}, D = {test.statistic:.4f}, p = {test.pvalue:.2g}"
        failed = () if test.pvalue > bound else ("apart",)
        checks.append(Check(name, seen, f"p > {bound:.1g}", failed))
    return checks


def _side(difference: float) -> str:
    return "above" if difference > 0 else "below"


def _failed_tenths(away: np.ndarray) -> tuple[str, ...]:
    """Which tenths are outside, by their differences in standard errors, and whether all have one sign."""
    failed = [f"tenth {i} {_side(x)}" for i, x in enumerate(away, 1) if not abs(x) <= 3]
    return (*failed, *([f"all {_side(away[0])}"] if np.ptp(np.sign(away)) == 0 else []))


def standard_error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the difference of the means of two samples over the first axis, their variances not assumed equal."""
    return np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))


def variance_ratios(n: int, m: int, level: float = 0.01) -> tuple[float, float]:
    """Between which ratios of the variances of normal samples of n and m an F test, two-sided, finds no difference."""
    test = scipy.stats.f(n - 1, m - 1)
    return float(test.ppf(level / 2)), float(test.ppf(1 - level / 2))
