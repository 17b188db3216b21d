"""Replays name the device that computes wrongly; faults are made by a wrapped gradient, on simulated devices."""

import contextlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import vit_jax
from tests.integration.conftest import TINY
from tests.training.flips import flip
from vit_jax.checkpoints import fingerprints
from vit_jax.data import loader, sources
from vit_jax.devices import meshes
from vit_jax.training import state as states
from vit_jax.training.assembly import make_mesh, resolve
from vit_jax.training.upkeep import device_checks, replay
from vit_jax.training.upkeep.audit import CordonHost, WrongState
from vit_jax.training.with_data import assembly_for

FAULTS = 120
CLEAN, ALONE, EVERYWHERE = FAULTS, FAULTS + 1, FAULTS + 2  # steps
LAST = -7  # a label that no digit has
RNG = np.random.default_rng(0)
# For each step: the device at fault, the array, its element, and the bit.
PLAN = np.stack([RNG.integers(0, high, FAULTS) for high in (8, 2**30, 2**30, 32)], axis=1)


def faulty(gradient_of):
    """A gradient of which one device flips a bit, as `PLAN` says of the state's step; of step `ALONE` device 3 makes
    NaNs, of `EVERYWHERE` the rows of the last shard do on every device.
    """

    def gradient(state, batch):
        grads, *rest = gradient_of(state, batch)
        leaves, structure = jax.tree.flatten(grads)
        device, array, element, bit = (jnp.asarray(PLAN)[state.step % FAULTS, i] for i in range(4))
        mine = (jax.lax.axis_index(meshes.AXES) == device) & (state.step < FAULTS)
        for i, leaf in enumerate(leaves):
            bits = jax.lax.bitcast_convert_type(leaf, jnp.uint32).reshape(-1)
            hit = (jnp.arange(bits.size) == element % bits.size) & (array % len(leaves) == i)
            flipped = bits ^ jnp.where(hit & mine, jnp.uint32(1) << bit.astype(jnp.uint32), 0)
            leaf = jax.lax.bitcast_convert_type(flipped.reshape(leaf.shape), leaf.dtype)
            alone = (state.step == ALONE) & (jax.lax.axis_index(meshes.AXES) == 3)
            everywhere = (state.step == EVERYWHERE) & (batch["label"] == LAST).any()
            leaves[i] = jnp.where(alone | everywhere, jnp.nan, leaf)
        return jax.tree.unflatten(structure, leaves), *rest

    return gradient


class Run:
    """A state and a batch of a tiny run, and its checks of devices."""

    def __init__(self, monkeypatch, **overrides):
        config = vit_jax.load_config("configs/digits.py")
        options = TINY | {
            "model.depth": 1, "model.dropout": 0.1, "augment.mixup": 0.2, "audit.most": 10**6,
        }  # fmt: skip
        config.update_from_flattened_dict(options | overrides)
        config = resolve(config)
        source = sources.open_train(config.data)
        make_gradient = device_checks.make_gradient
        monkeypatch.setattr(
            device_checks, "make_gradient", lambda *arguments: faulty(make_gradient(*arguments))
        )
        assembly = assembly_for(config, source)
        self.mesh = make_mesh(config)
        with jax.set_mesh(self.mesh):
            like = assembly.abstract_state(self.mesh)
            self.state = states.create(assembly.init, 0, like)
            self.checks = device_checks.DeviceChecks(assembly, source, like, self.mesh)
        with loader.train_batches(
            source, config, meshes.batch_sharding(self.mesh), start_step=0, stop_step=1
        ) as batches:
            self.batch = next(iter(batches))

    def at(self, step: int):
        step = jax.device_put(np.int32(step), self.state.step.sharding)
        return self.state.replace(step=step)

    def replay(self, step: int):
        with jax.set_mesh(self.mesh):
            return self.checks.before(step, self.at(step), self.batch)


# Its programs serve two tests.
MESH = {"mesh.data": 4, "mesh.fsdp": 2, "mesh.fsdp_min_size": 64}


@pytest.mark.usefixtures("compilation_cache")
@pytest.mark.parametrize(
    "mesh, count",
    [
        (MESH, 4),
        pytest.param({}, 100, marks=pytest.mark.slow),
        pytest.param(
            {"mesh.data": 2, "mesh.fsdp": 2, "mesh.tensor": 2, "mesh.fsdp_min_size": 64}, 100,
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_device_that_computes_wrongly_is_named_at_the_next_replay(
    monkeypatch, caplog, mesh, count
):
    run = Run(monkeypatch, **mesh, **{"audit.replay_every": 1, "audit.every": 0})
    names, table, computed = (
        [device.id for device in run.mesh.devices.flat],
        run.checks._replay._table,
        [],
    )
    monkeypatch.setattr(
        run.checks._replay, "_table", lambda *a: (computed.append(a[-1]), table(*a))[1]
    )
    for step in range(count):
        caplog.clear()
        with caplog.at_level("ERROR", logger="absl"):
            run.replay(step)
        named = re.findall(
            r"device (\d+) of process 0 on \S+ computed other gradients", caplog.text
        )
        assert named == [str(names[PLAN[step, 0]])], (step, caplog.text)
        assert "3 of 3 times" in caplog.text
    caplog.clear()
    assert computed == [0, 1, 2] * count  # a third gradient where two differ
    computed.clear()
    run.replay(CLEAN)
    assert not caplog.records and computed == [0, 1]
    (program,) = run.checks._replay._compiled.values()
    gathered = set(re.findall(r"= \w+\[([\d,]+)\]\S* all-gather", program.as_text()))
    whole = {",".join(map(str, x.shape)) for x in jax.tree.leaves(run.state.params)}
    assert gathered <= whole and bool(gathered) == ("mesh.fsdp" in mesh)
    run.checks.events._most = 1
    with pytest.raises(CordonHost, match=f"Checkpoints after step {CLEAN}, .*cordon it"):
        run.replay(0)


def test_most_copies_decide_where_the_config_says_so_and_what_all_have_is_not_seen(
    monkeypatch, caplog
):
    run = Run(monkeypatch, **{"audit.every": 4, "audit.differing": "majority"})
    devices = run.mesh.devices.flat
    with jax.set_mesh(run.mesh), caplog.at_level("ERROR", logger="absl"):
        run.checks.start(0, run.state)
        state = run.at(4)  # and steps may have computed with it
        right = np.array(state.params["position"].addressable_data(0))
        flip(state.params["position"], devices[3], 5, 7)
        state = run.checks.verify(4, state)
        (record,) = (record for record in caplog.records if record.levelname == "ERROR")
        assert f"device {devices[3].id} of process 0 on " in record.message
        assert "(most copies have others). A good copy's bits took their place" in record.message
        for shard in state.params["position"].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), right)
        caplog.clear()
        run.checks.verify(4, state)
        state = state.replace(step=run.at(8).step)
        for device in devices:
            flip(state.params["position"], device, 5, 7)
        run.checks.verify(8, state)
        assert not any(record.levelname == "ERROR" for record in caplog.records)


@pytest.mark.usefixtures("compilation_cache")
def test_a_gradient_that_is_not_finite_on_one_device_alone_is_its_fault(monkeypatch):
    run = Run(monkeypatch, **MESH, **{"audit.every": 100, "nonfinite": "rollback"})
    read = loader.train_batches

    @contextlib.contextmanager
    def marked(*arguments, **options):
        """Batches of which the last row is known."""
        with read(*arguments, **options) as batches:
            yield (
                batch | {"label": jax.jit(lambda x: x.at[-1].set(LAST))(batch["label"])}
                for batch in batches
            )

    monkeypatch.setattr(loader, "train_batches", marked)

    def explain(step):
        state = run.at(step + 5)
        place = state.step.sharding
        health = state.health.replace(
            first_bad_step=jax.device_put(np.int32(step), place),
            bad_tensors=jax.device_put(np.ones(state.health.bad_tensors.shape, bool), place),
        )
        with jax.set_mesh(run.mesh):
            state = state.replace(health=health)
            run.checks.start(step + 5, state)
            return run.checks.explain(state, [])

    device = run.mesh.devices.flat[3].id
    for _ in range(2):  # each time that it is found, until the host was at fault too often
        run.checks._excused.clear()
        with pytest.raises(WrongState, match=f"not finite, but device {device} of process 0 on "):
            explain(ALONE)
    assert explain(EVERYWHERE) is not None  # The data's fault: as `config.nonfinite` says.
    with pytest.raises(WrongState, match="a device that cannot be named computed wrongly once"):
        explain(CLEAN)
    assert explain(CLEAN) is not None  # Twice the same is no accident.


def test_the_marks_of_an_audit_are_the_fingerprint_of_a_checkpoint(monkeypatch):
    run = Run(monkeypatch, **{"audit.every": 100, "mesh.fsdp": 4, "mesh.fsdp_min_size": 64})
    with jax.set_mesh(run.mesh):
        run.checks.start(0, run.state)
        parts = run.checks.verify(0, run.state).parts()
        expected = fingerprints.fingerprint(parts)
    found = run.checks.marks_of(parts)
    assert found.keys() == expected.keys() and {"params", "opt_state", "ema"} <= found.keys()
    for name in expected:
        np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


def table(values) -> np.ndarray:
    """Of devices along `data`, one array: (replica, data, fsdp, tensor, arrays, columns)."""
    return np.array(values, np.uint32).reshape(1, -1, 1, 1, 1, 1)


def test_a_fault_that_happens_once_is_named_too():
    found = replay.judge([table([7, 8, 9]), table([9, 70, 8]), table([8, 9, 7])], ["w"])
    assert found == [replay.WrongResult(1, True, 1, ["w"])]


def test_of_two_devices_either_may_be_wrong_unless_one_contradicts_itself():
    always = replay.judge([table([7, 8]), table([80, 7]), table([7, 8])], ["w"])
    assert {(one.device, one.certain) for one in always} == {(0, False), (1, False)}
    once = replay.judge([table([7, 8]), table([8, 7]), table([70, 8])], ["w"])
    assert once == [replay.WrongResult(0, True, 1, ["w"])]
    alone = replay.judge([table([7]), table([7]), table([70])], ["w"])
    assert alone == [replay.WrongResult(0, True, 1, ["w"])]


def test_the_same_mistake_of_two_devices_is_not_seen():
    assert replay.judge([table([70, 8, 9]), table([9, 70, 8])], ["w"]) == []
