"""Whether two samples look as if they had one distribution: runs of several seeds, and draws of many images.

The rule for runs was written before the runs that it judges (docs/fidelity.md, "The rule").
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import scipy.optimize
import scipy.stats

TENTHS = 10
LEVEL = 0.05  # the probability that a table of equal engines calls any row different
POWER = 0.8
LEVEL_OF_DRAWS = 0.001  # of the Kolmogorov-Smirnov tests of a row together


@dataclasses.dataclass(frozen=True)
class Difference:
    """How far one number of a row differs between two engines.

    Attributes:
      row: the row's name.
      number: 'end', the last tenth, or 'area', the mean over all tenths.
      ours, theirs: means over the seeds.
      error: standard error of their difference.
      scatter: standard deviation of one run, pooled over both engines.
      seeds: how many runs each engine has.
      p_value: of Welch's test, two-sided.
    """

    row: str
    number: str
    ours: float
    theirs: float
    error: float
    scatter: float
    seeds: int
    p_value: float


@dataclasses.dataclass(frozen=True)
class Draws:
    """How two samples of one drawn quantity compare: p of Kolmogorov-Smirnov and the bound that it must exceed."""

    name: str
    seen: str
    p_value: float
    bound: float

    @property
    def differs(self) -> bool:
        return self.p_value <= self.bound


def differences(row: str, ours: np.ndarray, theirs: np.ndarray) -> list[Difference]:
    """The two numbers of a row.

    Args:
      row: its name.
      ours, theirs: (seeds, `TENTHS`) of the quantity that judges the row.
    """
    numbers = {"end": (ours[:, -1], theirs[:, -1]), "area": (ours.mean(1), theirs.mean(1))}
    return [_difference(row, number, *samples) for number, samples in numbers.items()]


def _difference(row: str, number: str, ours: np.ndarray, theirs: np.ndarray) -> Difference:
    return Difference(
        row=row,
        number=number,
        ours=float(ours.mean()),
        theirs=float(theirs.mean()),
        error=float(standard_error(ours, theirs)),
        scatter=float(np.sqrt((ours.var(ddof=1) + theirs.var(ddof=1)) / 2)),
        seeds=min(len(ours), len(theirs)),
        p_value=float(scipy.stats.ttest_ind(ours, theirs, equal_var=False).pvalue),
    )


def rejected(p_values: Sequence[float], tests: int) -> list[bool]:
    """Which hypotheses Holm's correction rejects at `LEVEL`.

    Args:
      p_values: of the tests that were made.
      tests: how many the rule has. One that was not made counts as a test that finds nothing.
    """
    decided = [False] * len(p_values)
    for step, index in enumerate(np.argsort(p_values)):
        if p_values[index] > LEVEL / (tests - step):
            break
        decided[index] = True
    return decided


def smallest_seen(seeds: int, level: float) -> float:
    """The difference, in scatters of a run, that a t-test of two samples at `level` finds with probability `POWER`."""
    degrees = 2 * seeds - 2
    critical = scipy.stats.t.ppf(1 - level / 2, degrees)

    def missing_power(difference: float) -> float:
        # A difference so large is hardly ever found with the wrong sign, so the other tail is left out.
        return scipy.stats.nct.sf(critical, degrees, difference * np.sqrt(seeds / 2)) - POWER

    return float(scipy.optimize.brentq(missing_power, 0.5, 5))


def describe_tenths(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Differences of each tenth's means in standard errors, of (seeds, `TENTHS`) each. They judge nothing."""
    away = (ours.mean(0) - theirs.mean(0)) / standard_error(ours, theirs)
    return " ".join(f"{x:+.1f}" for x in away)


def compare_draws(ours: dict, theirs: dict) -> list[Draws]:
    """Compares samples by the name of a quantity, each (draws,), by Kolmogorov-Smirnov with Bonferroni's bound."""
    compared = []
    for name in ours:
        test = scipy.stats.ks_2samp(ours[name], theirs[name])
        means = f"means {ours[name].mean():.4g} and {theirs[name].mean():.4g}"
        seen = f"{means}, D = {test.statistic:.4f}"
        compared.append(Draws(name, seen, float(test.pvalue), LEVEL_OF_DRAWS / len(ours)))
    return compared


def standard_error(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Of the difference of the means of two samples over the first axis, their variances not assumed equal."""
    return np.sqrt(a.var(0, ddof=1) / len(a) + b.var(0, ddof=1) / len(b))
