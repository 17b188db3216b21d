"""Local checkpoints of one process with eight devices; several processes are in
`tests/integration/test_tiers.py`.
"""

import runpy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import fingerprints, shards, tiers
from vit_jax.devices import meshes


def make_state(mesh, value: float) -> dict:
    """Arrays of all types that states have, sharded over several axes, over one, and over none."""
    place = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    values = value + jnp.arange(64.0).reshape(8, 8)
    return {
        "step": place(jnp.int32(value)),
        "params": {
            "kernel": place(values, "fsdp", "tensor"),
            "bias": place(values[0]),
            "moment": place(values.astype(jnp.bfloat16), None, ("fsdp", "tensor")),
        },
        "flags": place(values[0] > 3, "fsdp"),
    }


@pytest.fixture
def mesh():
    return meshes.make_mesh({"data": 2, "fsdp": 2, "tensor": 2})


@pytest.fixture
def state(mesh):
    return make_state(mesh, 1)


@pytest.fixture
def tier(state, tmp_path):
    (tmp_path / "run").mkdir()
    return lambda like=state: tiers.LocalTier(
        str(tmp_path / "disk"), epath.Path(tmp_path / "run"), like_of(like)
    )


def like_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def files(tmp_path) -> list:
    return sorted((tmp_path / "disk").glob("*/*"), key=lambda path: int(path.name.split(".")[2]))


def assert_same(got, expected):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert a.sharding == b.sharding and a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


def saved(tier, mesh, *steps):
    one = tier()
    for step in steps:
        one.save(step, make_state(mesh, step), {"step": step, "config": {}})
    one.close()
    return one


def test_the_newest_state_comes_back_after_a_restart(tier, mesh, tmp_path):
    saved(tier, mesh, 1, 2, 3)
    assert [path.name.split(".")[2] for path in files(tmp_path)] == ["2", "3"]
    described = []
    step, parts = tier().restore(0, described.append)
    assert step == 3 and described == [{"step": 3, "config": {}}]
    assert_same(parts, make_state(mesh, 3))


def test_the_launcher_counts_a_newer_local_checkpoint_as_progress(tier, mesh, tmp_path):
    newest_step = runpy.run_path("launch/local.py")["newest_step"]
    saved(tier, mesh, 4, 6)
    assert newest_step(str(tmp_path / "run"), str(tmp_path / "disk")) == 6
    assert newest_step(str(tmp_path / "other"), str(tmp_path / "disk")) == -1
    assert newest_step(str(tmp_path / "run")) == -1


def test_what_is_restored_is_a_copy_that_training_may_overwrite(tier, mesh):
    one = saved(tier, mesh, 1)
    _, parts = one.restore(0)
    jax.block_until_ready(
        jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)(parts)
    )
    assert_same(one.restore(0)[1], make_state(mesh, 1))


def test_a_copy_does_not_change_when_the_state_is_overwritten(tier, mesh):
    one, state = tier(), make_state(mesh, 1)
    one.save(1, state, {"config": {}})
    jax.block_until_ready(
        jax.jit(lambda x: jax.tree.map(lambda y: y * 0, x), donate_argnums=0)(state)
    )
    assert_same(one.restore(0)[1], make_state(mesh, 1))


def test_a_copy_is_in_no_memory_of_a_device(mesh, state):
    layout = shards.Layout(like_of(state))
    on_devices = [np.asarray(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]
    for copied in layout.copy_own(state).values():
        assert not any(np.shares_memory(copied, one) for one in on_devices)


def test_shards_are_exchanged_by_the_devices_bit_for_bit(mesh, state):
    layout = shards.Layout(like_of(state))
    mine = layout.copy_own(state)
    assert len(mine) == layout.count == 1 + 4 + 1 + 4 + 2
    assert_same(layout.gathered(mine, set(mine)), state)
    nothing = layout.gathered(mine, set())  # What nobody sends is zero, so it was sent before.
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(nothing))


def test_a_state_of_the_workdir_that_is_as_new_wins(tier, mesh):
    assert saved(tier, mesh, 2).restore(2) is None


@pytest.mark.parametrize("damage", ["a shard", "the header", "the end", "all"])
def test_a_damaged_file_is_reported_and_the_one_before_is_used(
    tier, mesh, tmp_path, caplog, damage
):
    saved(tier, mesh, 1, 2)
    newest = files(tmp_path)[-1]
    content = bytearray(newest.read_bytes())
    if damage == "all":
        content = b""
    elif damage == "the end":
        content = content[:-1]
    else:
        content[-3 if damage == "a shard" else 40] ^= 1
    newest.write_bytes(content)
    step, parts = tier().restore(0)
    assert step == 1
    assert_same(parts, make_state(mesh, 1))
    assert str(newest) in caplog.text and "damaged" in caplog.text


def test_a_file_whose_bits_are_not_those_of_the_audit_is_reported_and_the_one_before_is_used(
    tier, mesh, caplog
):
    """Changed between the audit and the write: the file's own checksums are right."""
    one = saved(tier, mesh, 1)
    other = make_state(mesh, 2)
    other["params"]["bias"] += 1
    one.save(2, make_state(mesh, 2), {"config": {}}, fingerprints.fingerprint(other))
    one.close()
    step, parts = tier().restore(0)
    assert step == 1
    assert_same(parts, make_state(mesh, 1))
    assert "the bits of params/bias in step 2 are not those that were saved" in caplog.text


def test_files_of_an_earlier_run_in_the_workdir_are_not_used_and_soon_deleted(
    tier, mesh, tmp_path, caplog
):
    saved(tier, mesh, 5)
    (tmp_path / "run" / tiers.RUN).unlink()
    new = tier()
    assert new.restore(0) is None and "of an earlier run" in caplog.text
    new.save(1, make_state(mesh, 1), {"config": {}})
    new.close()
    assert [path.name.split(".")[2] for path in files(tmp_path)] == ["1"]


def test_files_of_another_mesh_are_not_used(tier, mesh, caplog):
    saved(tier, mesh, 5)
    other = make_state(meshes.make_mesh({"data": 1, "fsdp": 4, "tensor": 2}), 1)
    assert tier(other).restore(0) is None and "config.mesh" in caplog.text


def test_files_of_another_config_are_not_used(tier, mesh, caplog):
    def refuse(description):
        raise ConfigError("the config differs in config.seed")

    assert saved(tier, mesh, 5).restore(0, refuse) is None
    assert "config.seed" in caplog.text


def test_a_folder_that_cannot_be_made_ends_nothing(tier, mesh, tmp_path, caplog):
    (tmp_path / "disk").write_text("a file")
    one = saved(tier, mesh, 1, 2)
    assert one.restore(0) is None
    assert "cannot be used" in caplog.text
    assert caplog.text.count("cannot be written") == 1


def test_when_the_workdir_has_the_last_state_the_files_are_deleted(tier, mesh, tmp_path):
    saved(tier, mesh, 1, 2).discard()
    assert not list((tmp_path / "disk").iterdir())


def test_files_that_were_not_finished_are_deleted(tier, mesh, tmp_path):
    saved(tier, mesh, 1)
    left = files(tmp_path)[0].with_name("01234567.0.7.new")
    left.write_bytes(b"half")
    saved(tier, mesh, 2)
    assert not left.exists()
