"""Whatever happens to one file of a checkpoint: its state is read to the bit, or that of the one before."""

import asyncio
import json
import pathlib
import random
import resource
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import tensorstore

from vit_jax.base import limits
from vit_jax.base.errors import CheckpointError
from vit_jax.checkpoints import descriptions, fingerprints, reading, saving, storage
from vit_jax.config import Checkpoint, default_config

NEWEST, BEFORE = 2, 1
DESCRIPTION = {
    "config": default_config().to_dict(),
    "model": {"name": "ViT-S/16"},
    "classes": ["a", "b"],
    "training_data": "",
}


def parts_of(step: int) -> dict:
    rng = np.random.default_rng(step)
    kernel = jnp.asarray(rng.normal(size=(4, 8, 16)), jnp.float32)
    return {
        "step": jnp.int32(step),
        "params": {"layers": {"kernel": kernel, "scale": jnp.ones((4, 8), jnp.bfloat16)}},
        "opt_state": ({"kernel": kernel / 3}, jnp.int32(step)),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """The workdir of two checkpoints."""
    workdir = tmp_path_factory.mktemp("saved")
    checkpoints = saving.Checkpoints(workdir, Checkpoint())
    for step in (BEFORE, NEWEST):
        checkpoints.save_now(step, parts_of(step), DESCRIPTION)
    checkpoints.close()
    return workdir


def like_of(arrays: dict) -> dict:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays)


def like() -> dict:
    return like_of(parts_of(1))


def restored(workdir: pathlib.Path) -> int:
    """The step that is restored, whose bits are those that were saved."""
    checkpoints = saving.Checkpoints(workdir, Checkpoint())
    try:
        step, parts = checkpoints.restore_latest(like())
    finally:
        checkpoints.close()
    jax.tree.map(np.testing.assert_array_equal, parts, parts_of(step))
    return step


def files_of(checkpoint: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def flip(file: pathlib.Path, seed: int) -> None:
    content = bytearray(file.read_bytes())
    if not content:  # a mark, whose name alone counts
        return
    bit = random.Random(seed).randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def other_steps(file: pathlib.Path, workdir: pathlib.Path, saved: pathlib.Path) -> None:
    """Puts the older checkpoint's file, or its largest of that folder, in its place."""
    relative = file.relative_to(workdir / "checkpoints" / str(NEWEST))
    old = saved / "checkpoints" / str(BEFORE) / relative
    if not old.exists():  # a file of data, which has a name of its own
        old = max(old.parent.iterdir(), key=lambda path: path.stat().st_size)
    shutil.copy(old, file)


DAMAGE = {
    "removed": lambda file, *_: file.unlink(),
    "cut": lambda file, *_: file.write_bytes(file.read_bytes()[: file.stat().st_size // 2]),
    "emptied": lambda file, *_: file.write_bytes(b""),
    "zeroed": lambda file, *_: file.write_bytes(bytes(file.stat().st_size)),
    "an older step's": other_steps,
    **{f"flipped {i}": lambda file, *_, i=i: flip(file, i) for i in range(6)},
}


@pytest.mark.slow
@pytest.mark.parametrize("how", DAMAGE)
def test_any_file_of_a_checkpoint_may_be_damaged(saved, tmp_path, how):
    names = [path.relative_to(saved) for path in files_of(saved / "checkpoints" / str(NEWEST))]
    steps = {}
    for i, name in enumerate(names):
        workdir = tmp_path / str(i)
        shutil.copytree(saved, workdir)
        DAMAGE[how](workdir / name, workdir, saved)
        steps[str(name)] = restored(workdir)
    assert set(steps.values()) <= {BEFORE, NEWEST} and len(steps) >= 8


@pytest.mark.parametrize(
    "seeds", [range(2), pytest.param(range(2, 200), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_a_flipped_bit_of_orbaxs_metadata_falls_back_to_the_checkpoint_before(
    saved, tmp_path, seeds
):
    for seed in seeds:
        workdir = tmp_path / str(seed)
        shutil.copytree(saved, workdir)
        flip(workdir / "checkpoints" / str(NEWEST) / "state" / "_METADATA", seed)
        assert restored(workdir) in (BEFORE, NEWEST)
        shutil.rmtree(workdir)


def test_a_description_belongs_to_its_state(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "run")
    newest = tmp_path / "run" / "checkpoints" / str(NEWEST)
    shutil.rmtree(newest / "state")
    shutil.copytree(saved / "checkpoints" / str(BEFORE) / "state", newest / "state")
    with pytest.raises(CheckpointError, match="are not those that were saved"):
        reading.read_parts(newest, like())
    assert restored(tmp_path / "run") == BEFORE


def as_of_an_earlier_version(folder: pathlib.Path) -> None:
    """Removes what earlier versions did not save."""
    description = reading.read_description(folder)
    del description["digests"]
    file = folder / "description" / "metadata"
    file.write_text(json.dumps(descriptions.sealed(description)))


def test_a_checkpoint_of_an_earlier_version_is_verified_by_its_sums(tmp_path):
    checkpoints = saving.Checkpoints(tmp_path, Checkpoint())
    parts = parts_of(1)
    marks = jax.device_get(fingerprints.fingerprint(parts))
    wrong = marks | {"params": marks["params"] + np.array([[0], [1]], np.uint32)}
    for step, of_step in ((1, marks), (2, wrong)):
        checkpoints.save_now(step, parts, DESCRIPTION, of_step)
    checkpoints.close()
    good, damaged = (tmp_path / "checkpoints" / step for step in "12")
    for folder in (good, damaged):
        as_of_an_earlier_version(folder)
    jax.tree.map(np.testing.assert_array_equal, reading.read_parts(good, like()), parts)
    array = reading.read_array(good, "params", parts["params"], "layers/scale")
    np.testing.assert_array_equal(array, parts["params"]["layers"]["scale"])
    with pytest.raises(CheckpointError, match="the bits of params/layers/scale are not those"):
        reading.read_parts(damaged, like())
    with pytest.raises(CheckpointError, match="the bits of params/layers/scale are not those"):
        reading.read_array(damaged, "params", parts["params"], "layers/scale")


def test_what_cannot_be_opened_for_want_of_descriptors_is_not_damaged(saved):
    """As Python and as TensorStore say it."""
    newest = saved / "checkpoints" / str(NEWEST)
    array = {"driver": "zarr", "kvstore": f"file://{newest}/state/|ocdbt:step/"}
    before, errors = resource.getrlimit(resource.RLIMIT_NOFILE), []
    for read in (
        lambda: reading.read_description(newest),
        lambda: tensorstore.open(array).result(),
    ):
        resource.setrlimit(resource.RLIMIT_NOFILE, (0, before[1]))
        try:
            read()
        except (limits.MachineError, ValueError) as error:
            errors.append(error)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    of_python, of_tensorstore = errors
    assert "description/metadata cannot be read: this process has all the" in str(of_python)
    failure = storage.failure(newest, of_tensorstore)
    assert isinstance(failure, limits.MachineError) and f"{newest} cannot be read" in str(failure)
    assert storage.failure(newest, ValueError("NOT_FOUND: no such array")) is None


def test_of_a_damaged_state_nothing_is_under_way_when_that_is_said(tmp_path, monkeypatch):
    """Else asyncio and TensorStore print a line, or many, for each array."""
    arrays = {f"array {i}": jnp.full((64, 64), i, jnp.float32) for i in range(100)}
    checkpoints = saving.Checkpoints(tmp_path, Checkpoint())
    checkpoints.save_now(1, {"params": arrays}, DESCRIPTION)
    checkpoints.close()
    folder = tmp_path / "checkpoints" / "1"
    for file in folder.glob("state/**/d/*"):
        file.unlink()
    under_way, make = [], asyncio.new_event_loop
    read, slow = ocp.type_handlers.ArrayHandler.deserialize, set()

    async def read_more_slowly(*arguments):
        slow.add(asyncio.create_task(asyncio.sleep(0.2)))  # longer than a file is looked for
        return await read(*arguments)

    monkeypatch.setattr(ocp.type_handlers.ArrayHandler, "deserialize", read_more_slowly)

    def watched():
        loop = make()
        close = loop.close
        loop.close = lambda: (under_way.append(len(asyncio.all_tasks(loop))), close())
        return loop

    monkeypatch.setattr(asyncio, "new_event_loop", watched)
    with pytest.raises(CheckpointError, match="is damaged"):
        reading.read_parts(folder, {"params": like_of(arrays)})
    assert under_way and not any(under_way)
