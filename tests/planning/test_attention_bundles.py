"""The attention kernels' schedules are no slower than those that were reviewed: see `attention_bundles.py`."""

import json

import pytest

from tests.planning import attention_bundles

# A few seconds; the others with -m slow.
QUICK = ("S/16",)
SLOWER = 1.02


@pytest.mark.parametrize(
    "name",
    [
        n if n in QUICK else pytest.param(n, marks=pytest.mark.slow)
        for n in attention_bundles.SHAPES
    ],
)
def test_a_schedule_is_as_short_as_the_reviewed_one(name):
    reviewed = json.loads(attention_bundles.FILE.read_text())
    if reviewed["versions"] != attention_bundles.versions():
        pytest.skip(f"reviewed with {reviewed['versions']}, here {attention_bundles.versions()}")
    counted = attention_bundles.count(name)
    assert counted.keys() == reviewed[name].keys() == {"forward", "backward"}
    assert all(counted[one] <= SLOWER * bundles for one, bundles in reviewed[name].items())


@pytest.mark.parametrize("name", attention_bundles.WITH_LENGTHS)
def test_key_lengths_cost_at_most_three_percent(name):
    reviewed = json.loads(attention_bundles.FILE.read_text())
    with_lengths, without = (
        sum(reviewed[n].values()) for n in (name, name.removesuffix(", lengths"))
    )
    assert with_lengths <= 1.03 * without
