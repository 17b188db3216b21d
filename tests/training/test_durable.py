"""What is on the disk before a file has its name: else a machine that loses its power may keep the name alone."""

import os
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath

from vit_jax.base import places
from vit_jax.checkpoints import saving, shards
from vit_jax.config import Checkpoint
from vit_jax.data.preparation.output import Output


@pytest.fixture
def renamed(monkeypatch, tmp_path) -> list[tuple[str, int, int]]:
    """Of each file, or file in a folder, that got another name since: that, its bytes, and those that were on the disk
    by then.
    """
    synced, found, sync = {}, [], os.fsync

    def fsync(file):
        sync(file)
        about = os.fstat(file)
        synced[about.st_ino] = about.st_size

    def renaming(rename):
        def rename_and_note(source, target, **options):
            assert not os.path.exists(target)  # it has another name until it is whole
            files = [
                os.path.join(where, name) for where, _, names in os.walk(source) for name in names
            ]
            for file in files or [source]:
                about = os.stat(file)
                place = os.path.relpath(
                    os.path.join(target, os.path.relpath(file, source)), tmp_path
                )
                found.append((place, about.st_size, synced.get(about.st_ino, -1)))
            rename(source, target, **options)

        return rename_and_note

    monkeypatch.setattr(os, "fsync", fsync)
    for name in ("rename", "replace"):
        monkeypatch.setattr(os, name, renaming(getattr(os, name)))
    return found


def write_small(path):
    places.write_whole(epath.Path(path), "x" * 1000)


def write_local_checkpoint(path):
    shards.write_shards(path, {"step": 1}, {0: np.ones(1000), 1: np.zeros(10)})


def write_prepared(path):
    with Output(epath.Path(path.parent), "") as output:
        output.write(path.name, bytes(1000))


WRITERS = {
    "a small file": write_small,
    "a local checkpoint": write_local_checkpoint,
    "a file of a prepared set": write_prepared,
}


@pytest.mark.parametrize("kind", WRITERS)
def test_a_file_is_on_the_disk_before_it_has_its_name(kind, renamed, tmp_path):
    WRITERS[kind](tmp_path / "name")
    ((name, size, synced),) = renamed
    assert name == "name" and synced == size > 999


STATE = {"params": {"a": np.ones((300, 300), np.float32), "b": np.zeros(7, np.float32)}}
SAID = {"config": {}, "model": {}, "classes": [], "training_data": ""}


def save(workdir):
    checkpoints = saving.Checkpoints(workdir, Checkpoint())
    checkpoints.save_now(1, jax.tree.map(jnp.asarray, STATE), SAID)
    checkpoints.close()


def test_a_checkpoint_is_on_the_disk_before_it_has_its_name(renamed, tmp_path):
    """Without the arrays, which TensorStore syncs."""
    save(tmp_path)
    files = {name: (size, synced) for name, size, synced in renamed}
    ours = {n: sizes for n, sizes in files.items() if n.startswith("checkpoints/1/")}
    ours = {n: sizes for n, sizes in ours.items() if "/d/" not in n and "/ocdbt." not in n}
    assert {
        "description/metadata",
        "state/_METADATA",
        "_CHECKPOINT_METADATA",
        "commit_success.txt",
    } <= {name.removeprefix("checkpoints/1/") for name in ours}
    assert all(size == synced for size, synced in ours.values()), ours


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("strace"), reason="what TensorStore does is seen by strace")
def test_the_arrays_of_a_checkpoint_are_on_the_disk_before_it_has_its_name(tmp_path):
    command = [
        sys.executable,
        "-c",
        f"import runpy; runpy.run_path({__file__!r})['save']({str(tmp_path / 'run')!r})",
    ]
    trace = ["strace", "-f", "-y", "-e", "trace=fsync,rename", "-o", str(tmp_path / "calls")]
    subprocess.run([*trace, *command], check=True, timeout=300)
    calls = (tmp_path / "calls").read_text().split('orbax-checkpoint-tmp", "')[0]
    synced = set(
        re.findall(r"fsync\(\d+<[^>]*/1.orbax-checkpoint-tmp/([^>]*)>(?:\) += 0| <unfin)", calls)
    )
    folder = tmp_path / "run" / "checkpoints" / "1"
    files = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    synced = {re.sub(r"\.(__lock|new)$", "", name) for name in synced}
    assert files <= synced and any("/d/" in name for name in files), files - synced
