"""Marks of every copy: one wrong bit is found, named by array and device, and undone; on simulated devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.training.flips import flip
from vit_jax.compute import digests
from vit_jax.devices import meshes
from vit_jax.training.upkeep.audit import Events
from vit_jax.training.upkeep.copies import Copies

SPECS = {
    "params/whole": (P(), "float32"),
    "params/sharded": (P(None, "fsdp"), "bfloat16"),
    "ema/over_data": (P(("fsdp", "data")), "float32"),
    "opt_state/mu": (P("data", "fsdp"), "float32"),
    "step": (P(), "int32"),
    "mask": (P(), "bool"),
}
SIZES = {"1 x 8": (8, 1, 1), "4 x 2": (4, 2, 1), "2 x 2 x 2": (2, 2, 2)}


class Case:
    """A tree on a mesh and its copies."""

    def __init__(self, sizes):
        self.mesh = meshes.make_mesh(dict(zip(meshes.SIZES, sizes, strict=True)))
        self.copies = Copies(self.tree(like=True), self.mesh)
        self.count = len(self.copies.names)
        self.all, self.none = np.ones(self.count, bool), np.zeros(self.count, bool)

    def tree(self, like=False):
        rng, tree = np.random.default_rng(0), {}
        for name, (spec, dtype) in SPECS.items():
            place = NamedSharding(self.mesh, spec)
            value = np.asarray(rng.normal(size=(16, 32)) * 9).astype(jnp.dtype(dtype))
            tree[name] = (
                jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=place)
                if like
                # In memory of its own on every device.
                else jax.jit(jnp.copy, out_shardings=place)(value)
            )
        return tree


@pytest.fixture(scope="module", params=SIZES)
def case(request):
    return Case(SIZES[request.param])


def test_totals_are_the_marks_of_whole_arrays_however_they_are_sharded(case):
    tree = case.tree()
    marks = case.copies.mark(tree, case.copies.none(), case.none)
    assert int(marks.wrong) == 0
    expected = [digests.host_mark(np.asarray(tree[name])) for name in case.copies.names]
    np.testing.assert_array_equal(marks.totals, expected)


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_flips_are_found_named_and_undone(case, count):
    copies, rng = case.copies, np.random.default_rng(count)
    good = case.tree()
    before = copies.mark(good, copies.none(), case.none).of_devices
    for _ in range(count):
        tree = case.tree()
        name, position = copies.names[rng.integers(case.count)], int(rng.integers(8))
        flip(tree[name], case.mesh.devices.flat[position], *map(int, rng.integers(2**30, size=2)))
        # A device that knows what it held names itself, whatever the others hold.
        marks = copies.mark(tree, before, case.all)
        assert int(marks.wrong) > 0
        findings = copies.find(marks, before, case.all)
        assert [(f.array, f.device, f.certain) for f in findings.faults] == [(name, position, True)]
        number = copies._sets(copies.names.index(name)).shape[1]
        assert findings.curable == (number > 1)
        if findings.curable:
            healed = copies.heal(tree, findings)
            assert int(copies.mark(healed, before, case.all).wrong) == 0
            np.testing.assert_array_equal(
                np.asarray(healed[name]).view(np.uint8), np.asarray(good[name]).view(np.uint8)
            )
        # Without marks the majority decides, where there is one.
        marks = copies.mark(tree, before, case.none)
        found = copies.find(marks, before, case.none).faults if int(marks.wrong) else []
        if number == 1:
            assert not found
        elif number == 2:
            assert len(found) == 2 and not any(f.certain for f in found)
        else:
            assert [(f.array, f.device) for f in found] == [(name, position)]


def test_the_program_moves_nothing_but_sums_and_bounds_of_marks(case):
    copies = case.copies
    program = copies.program.lower(jax.tree.leaves(case.tree()), copies.none(), case.none).compile()
    moved = re.findall(r"= (\w+)\[([\d,]*)\]\S* (all-\w+|collective-\w+)\(", program.as_text())
    assert moved and {kind for _, _, kind in moved} == {"all-reduce"}
    bytes_of = [4 * int(np.prod([int(n) for n in shape.split(",") if n])) for _, shape, _ in moved]
    assert max(bytes_of) <= 8 * case.count * 2  # replicas x arrays x 8 bytes, of two replicas


def test_a_host_is_to_be_cordoned_when_it_was_at_fault_often_enough():
    events = Events(2)
    events.add({"a", "b"})
    events.add({"c"})
    assert not events.cordon
    events.add({"b"})
    assert events.cordon.startswith("the host b was at fault 2 times")
