"""Cases that take long and repeat what another case of their test asserts: they are slow."""

from collections.abc import Collection, Iterable

import pytest


def slow_unless(quick: Collection, cases: Iterable) -> list:
    """Parameters of a test: `cases`, of which those that are not in `quick` are marked slow. A tuple is several
    parameters.
    """
    assert all(case in cases for case in quick), "a case is not among all"
    return [case if case in quick else _slow(case) for case in cases]


def _slow(case):
    return pytest.param(*(case if isinstance(case, tuple) else (case,)), marks=pytest.mark.slow)
