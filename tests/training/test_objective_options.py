"""Every option of every objective reaches all that is trained, adapters too: of two runs that differ in it, every array
of parameters differs after some steps, or has another shape.
"""

import numpy as np
import pytest

from tests.training.option_cases import OBJECTIVE, Case
from tests.training.test_options import UNCHANGING
from tests.training.test_states_in_parts import teacher  # noqa: F401
from tests.training.tiny_objectives import NEEDS, assembled, stepped
from vit_jax import objectives
from vit_jax.base import schema
from vit_jax.base.errors import ConfigError

STEPS = 3
# The Gram teacher's second refresh is before step 3, whose gradients change the encoder; heads follow in step 4, their
# lengths by more than a rounding error in step 5.
STEPS_OF = {("dino", "gram_refreshes"): 5}
# The last norm learns nothing where a head reads the layers before it.
LAST_NORM = ("params/encoder/norm/",)
# The sigmoids' bias of -10 makes its own gradient the same to the bit, whatever the vectors are after so few steps.
RESTING = {"features": LAST_NORM, "sum": ("params_objective/terms/image_text/bias",)}
OF_TEXTS = ("image_text", "sum")  # an image is compared with all texts of its batch
SETTINGS = {
    "alone": {},
    "adapters": {"lora.lora_rank": 2, "init_from": "{teacher}"},
    "accumulation": {"accumulate": 2},
    "frozen parts": {"optim.freeze": ("embedding/.*",)},
}


def test_every_option_of_objectives_is_tried():
    named = {
        f"{name}.{field.name}"
        for name, kind in objectives.OBJECTIVES.items()
        for field in schema.options(kind.Options)
    }
    tried = {f"{name}.{option}" for name, cases in OBJECTIVE.items() for option in cases}
    left = {name for name in UNCHANGING if name.partition(".")[0] in objectives.OBJECTIVES}
    assert tried | left == named and not tried & left


_trained: dict[str, dict[str, np.ndarray]] = {}  # by what was trained


def trained(
    name: str,
    setting: str,
    teacher,  # noqa: F811
    fields: dict,
    steps: int = STEPS,
) -> dict[str, np.ndarray]:
    key = repr((name, setting, fields, steps))
    if key not in _trained:
        state = stepped(assembled(name, teacher, SETTINGS[setting] | fields), steps)
        _trained[key] = {array: x for array, x in state.items() if array.startswith("params")}
    return _trained[key]


def options_of(case: Case, option: str) -> tuple[dict, dict]:
    """The fields of both runs, with whole names."""
    first = {} if case.first is None else {f"objective.{option}": case.first}
    second = {f"objective.{option}": case.value}
    return {**case.base, **first}, {**case.base, **second}


def resting_arrays(name: str, setting: str, fields: dict) -> tuple[str, ...]:
    """Beginnings of the names of arrays that learn nothing, or not yet."""
    resting = RESTING.get(name, ())
    if fields.get("objective.head") == "multilevel":
        resting = LAST_NORM
    if setting == "frozen parts":
        resting = (*resting, "params/embedding/")
    return resting


@pytest.mark.slow
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize(
    ("name", "option"), [(name, option) for name in NEEDS for option in OBJECTIVE[name]]
)
def test_an_option_of_an_objective_changes_all_that_is_trained(
    name,
    option,
    setting,
    teacher,  # noqa: F811
):
    first, second = options_of(OBJECTIVE[name][option], option)
    has_texts = name in OF_TEXTS and first.get("objective.tokenizer", "bytes")
    if setting == "accumulation" and has_texts:
        with pytest.raises(ConfigError, match="config.accumulate = 2"):
            trained(name, setting, teacher, first)
        return
    steps = STEPS_OF.get((name, option), STEPS)
    before = trained(name, setting, teacher, first, steps)
    try:
        after = trained(name, setting, teacher, second, steps)
    except ConfigError as error:
        assert option in str(error)
        return
    resting = resting_arrays(name, setting, first)
    alike = [x for x in before if x in after and np.array_equal(before[x], after[x])]
    assert [array for array in alike if not array.startswith(resting)] == []
