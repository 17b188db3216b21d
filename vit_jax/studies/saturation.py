"""Accuracy against compute, fitted with saturation at both ends: E = a (C + d)^-b + c (Scaling ViT, arXiv 2106.04560
§3.1). E is the share of wrong answers, c what no compute takes away, d what a model without any is worth.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from vit_jax.models import registry
from vit_jax.studies.compare import Comparison, Group

LEAST = 5  # points for four unknown numbers
_EXPONENTS = np.geomspace(0.02, 4.0, 25)
_SHIFTS = np.concatenate([[0.0], np.geomspace(1e-3, 1e3, 25)])


class Law(NamedTuple):
    """E = a (C + d)^-b + c.

    Attributes:
      a, b, c, d: none is negative; d is in the unit of C.
      residual: the largest distance of a point from it, in E.
    """

    a: float
    b: float
    c: float
    d: float
    residual: float

    def error(self, compute: float) -> float:
        """The share of wrong answers at this compute."""
        return self.a * (compute + self.d) ** -self.b + self.c


def fit(compute: Sequence[float], error: Sequence[float]) -> Law | None:
    """The law with the least squares; `None` for fewer than `LEAST` different computes.

    Args:
      compute: above 0, in any unit.
      error: shares of wrong answers.
    """
    import scipy.optimize  # takes over a second, and few reports need it

    amounts, errors = (np.asarray(x, np.float64) for x in (compute, error))
    if len(set(amounts)) < LEAST:
        return None
    unit = float(np.exp(np.log(amounts).mean()))
    x = amounts / unit

    def linear(exponent: float, shift: float) -> tuple[float, float, float]:
        """For b and d the best a and c, and their sum of squares."""
        columns = np.stack([(x + shift) ** -exponent, np.ones_like(x)], 1)
        (a, c), norm = scipy.optimize.nnls(columns, errors)
        return a, c, norm**2

    def loss(logarithms: np.ndarray) -> float:
        return linear(*np.exp(logarithms))[2]

    starts = [(linear(b, d)[2], b, d) for b in _EXPONENTS for d in _SHIFTS]
    _, b, d = min(starts)
    best = scipy.optimize.minimize(
        loss, np.log([b, max(d, 1e-6)]), method="Nelder-Mead",
        options={"xatol": 1e-9, "fatol": 1e-18, "maxiter": 4000},
    )  # fmt: skip
    b, d = map(float, np.exp(best.x))
    a, c, _ = linear(b, d)
    law = Law(a * unit**b, b, float(c), d * unit, 0.0)
    distances = [abs(law.error(at) - e) for at, e in zip(amounts, errors, strict=True)]
    return law._replace(residual=float(max(distances)))


def law_rows(comparison: Comparison) -> list[list[str]]:
    """A table of the laws: of each family of models with enough settings, and of the best of all at each compute; []
    where there are too few, or where runs are not judged by an accuracy.
    """
    if comparison.metric.rpartition("/")[2] != "accuracy":
        return []
    points = [(group, *_point(group)) for group in comparison.groups]
    points = [(g, amount, e) for g, amount, e in points if amount > 0 and math.isfinite(amount + e)]
    sets: dict[str, list[tuple[float, float]]] = {}
    for group, amount, error in points:
        sets.setdefault(_family(group), []).append((amount, error))
    if len(sets) > 1:
        sets["the best of all"] = frontier([(amount, error) for _, amount, error in points])
    table = []
    for name, chosen in sets.items():
        law = fit(*zip(*chosen, strict=True)) if chosen else None
        if law is not None:
            numbers = [f"{x:.3g}" for x in (law.a, law.b, law.d)]
            saturated = [f"{100 * x:.2f} %" for x in (law.c, law.residual)]
            table.append([name, str(len(chosen)), *numbers, *saturated])
    head = ["E = a (C + d)^-b + c", "settings", "a", "b", "d, exaFLOPs", "c", "largest distance"]
    return [head, *table] if table else []


def frontier(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (compute, error) those that no cheaper one is as good as, in the order of their compute."""
    chosen: list[tuple[float, float]] = []
    for amount, error in sorted(points):
        if not chosen or error < chosen[-1][1]:
            chosen.append((amount, error))
    return chosen


def _point(group: Group) -> tuple[float, float]:
    """Compute in exaFLOPs and share of wrong answers of a setting, means over its seeds."""
    mean = group.summary()["mean"]
    amounts = [run.exaflops for run in group.runs if math.isfinite(run.exaflops)]
    if mean is None or not amounts:
        return math.nan, math.nan
    return math.fsum(amounts) / len(amounts), 1 - mean


def _family(group: Group) -> str:
    name = (group.runs[0].config or {}).get("model.name", "")
    family = registry.find_family(name) if name else None
    return registry.family_name(family) if family else "all"
