"""How often the branches of a conditional run, in the name of its scope (`jax.named_scope`): plans read it
in the compiled program.
"""

import re
from collections.abc import Sequence

EQUALLY_LIKELY = (
    "equally_likely"  # a `jax.lax.switch` whose branches are drawn with equal probability
)
_ONE_STEP_IN = "one_step_in_"
_SCOPE = re.compile(rf"\b(?:{EQUALLY_LIKELY}|{_ONE_STEP_IN}(?P<period>\d+))/cond$")


def one_step_in(period: int) -> str:
    """Of a `jax.lax.cond` that does its work in one of `period` steps, and nothing in the others."""
    return f"{_ONE_STEP_IN}{period}"


def shares(source: str, costs: Sequence[float]) -> tuple[str, list[float]]:
    """How the branches of a conditional are counted: in words, and how often each runs.

    Args:
      source: the path of the operation; scopes further out than its own say nothing about it.
      costs: of one run of each branch.
    """
    scope = _SCOPE.search(source)
    if scope and not scope["period"]:
        return "equally likely", [1 / len(costs)] * len(costs)
    dearest = costs.index(max(costs))
    if not scope:
        return "the most expensive", [float(i == dearest) for i in range(len(costs))]
    once = 1 / int(scope["period"])
    return f"one step in {scope['period']}", [
        once if i == dearest else (1 - once) / (len(costs) - 1) for i in range(len(costs))
    ]
