"""Every option of an objective that is a late term of a sum reaches all that is trained, or is refused."""

import numpy as np
import pytest

from tests.training.option_cases import OBJECTIVE
from tests.training.test_objective_options import options_of
from tests.training.test_states_in_parts import teacher  # noqa: F401
from tests.training.tiny_objectives import NEEDS, STEPS, assembled, stepped
from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError
from vit_jax.objectives.image_text.image_text import TokenOptions

TERMS = [name for name in NEEDS if name not in ("sum", "segmentation")]  # these cannot be terms
# The term that trains from the first step on; each objective can be a term once.
FIRST_TERM = ("masked_patches", {})
INSTEAD = ("mae", {"width": 16, "depth": 1, "heads": 2})
OF_TOKENS = {f"objective.{field.name}" for field in schema.options(TokenOptions)}


def as_late_term(name: str, fields: dict) -> dict:
    """The fields of a run of this objective, as those of a sum in which it begins after a step."""
    term = {"start": "1 steps"}
    others = {}
    for field, value in (NEEDS[name] | fields).items():
        if field.startswith("objective.") and field not in OF_TOKENS:
            term[field.removeprefix("objective.")] = value
        else:
            others[field] = value
    if "data.views" in others:  # the other term sees one of its own
        others["data.views"] = ({}, *others["data.views"])
    if name != "image_text":
        others["objective.tokenizer"] = None
    first_term = INSTEAD if name == FIRST_TERM[0] else FIRST_TERM
    return {**others, "objective.terms": (first_term, (name, term))}


_trained: dict[str, dict[str, np.ndarray]] = {}  # by what was trained


def trained(name: str, teacher, fields: dict) -> dict[str, np.ndarray]:  # noqa: F811
    key = repr((name, fields))
    if key not in _trained:
        state = stepped(assembled("sum", teacher, as_late_term(name, fields)), STEPS)
        _trained[key] = {array: x for array, x in state.items() if array.startswith("params")}
    return _trained[key]


def test_all_objectives_but_those_of_masks_and_sums_are_tried_as_terms():
    kinds = objectives.OBJECTIVES
    assert set(TERMS) == {n for n in kinds if n != "sum" and not kinds[n].needs_masks}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in TERMS for option in OBJECTIVE[name]]
)
def test_an_option_of_a_late_term_changes_all_that_is_trained(name, option, teacher):  # noqa: F811
    first, second = options_of(OBJECTIVE[name][option], option)
    if second.get("objective.gram_weight"):
        with pytest.raises(ConfigError, match="set gram_weight to 0"):
            trained(name, teacher, second)
        return
    before = trained(name, teacher, first)
    after = trained(name, teacher, second)
    alike = [x for x in before if x in after and np.array_equal(before[x], after[x])]
    assert alike == []
