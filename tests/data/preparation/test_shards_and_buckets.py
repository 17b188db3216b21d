"""`prepare` from and to buckets, and by several processes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile

import pytest
from etils import epath

from tests.waiting import PATIENCE, until
from vit_jax.base import lock, places
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.base.lock import Locked
from vit_jax.data import sources
from vit_jax.data.options import Data
from vit_jax.data.preparation import work
from vit_jax.data.preparation.prepare import prepare
from vit_jax.data.preparation.verify import verify
from vit_jax.data.sources.stored_index import INDEX

from ..test_in_buckets import folder, image, upload  # noqa: F401 - a fixture

SIZES = {"train": 7, "test": 5}  # of 12 images, by their names


@pytest.fixture(scope="module")
def whole(folder, tmp_path_factory):  # noqa: F811
    """`folder`, prepared by one process: two files of 'train', two of 'test'."""
    out = tmp_path_factory.mktemp("whole") / "set"
    prepare(str(folder), str(out), num_shards=2, holdout=0.3)
    return out


def content(place):
    """Name → content of all files of a data set, the description without where it came from; without the index that
    buckets have, which knows these very files.
    """
    root = epath.Path(place)
    found = {file.name: file.read_bytes() for file in root.iterdir() if not file.is_dir()}
    description = json.loads(found["dataset.json"])
    del description["source"]
    assert (found.pop(INDEX, None) is not None) == places.in_bucket(root)
    # S3 cannot remove a lock only if it is unchanged: one that was released stays, empty.
    assert found.pop(f".{INDEX}.lock", b"") == b""
    return found | {"dataset.json": description}


def prepare_part(source, out, part, **options):
    return prepare(str(source), str(out), num_shards=2, holdout=0.3, part=part, **options)


@pytest.mark.parametrize("where", ["bucket", "s3_bucket"])
def test_from_a_bucket_to_a_bucket_is_from_a_disk_to_a_disk_to_the_byte(
    request, folder, whole, where  # noqa: F811
):  # fmt: skip
    url = request.getfixturevalue(where)
    upload(folder, f"{url}/raw")
    result = prepare_part(f"{url}/raw", f"{url}/set", (1, 1))
    assert result["splits"] == SIZES and result["bad"] == 0
    assert content(f"{url}/set") == content(whole)
    assert verify(f"{url}/set") == {"examples": 12, "bad": []}
    assert not (epath.Path(url) / "set" / work.NOTES).exists()


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 1, 2)])
def test_the_last_of_several_processes_completes_the_set_of_one(folder, whole, bucket, order):  # noqa: F811
    for number in order[:-1]:
        result = prepare_part(folder, f"{bucket}/set", (number, 3))
        assert result["missing"] > 0 and result["of"] == 4
    with pytest.raises(ConfigError, match="is not finished: . files are done"):
        verify(f"{bucket}/set")
    with pytest.raises(ConfigError, match="has no dataset.json"):
        sources.open_source(Data(name="prepared", path=f"{bucket}/set"), "train")
    assert prepare_part(folder, f"{bucket}/set", (order[-1], 3))["splits"] == SIZES
    assert content(f"{bucket}/set") == content(whole)
    assert prepare_part(folder, f"{bucket}/set", (1, 3))["splits"] == SIZES


def test_files_of_killed_processes_are_made_again_by_any_other(folder, whole, tmp_path):  # noqa: F811
    out = tmp_path / "set"
    prepare_part(folder, out, (1, 3))
    (out / "train-00001-of-00002.array_record-2-of-3.unfinished").write_bytes(b"half")
    prepare_part(folder, out, (1, 1))
    assert content(out) == content(whole)


def test_two_preparers_of_one_shard_are_refused(folder, bucket, tmp_path, monkeypatch):  # noqa: F811
    monkeypatch.setattr(lock, "_STALE_SECONDS", PATIENCE)
    monkeypatch.setattr(lock, "_RENEW_SECONDS", 0.2)
    for out in (epath.Path(tmp_path / "set"), epath.Path(bucket) / "set"):
        prepare_part(folder, out, (1, 2))
        recipe = json.loads((out / work.NOTES / "recipe.json").read_text())
        with work.output_of(out, recipe, (2, 2)):
            with pytest.raises(Locked, match="another process is preparing the same files"):
                prepare_part(folder, out, (2, 2))
            assert prepare_part(folder, out, (1, 2))["missing"] == 2
        assert prepare_part(folder, out, (2, 2))["splits"] == SIZES


def test_files_of_another_source_or_form_are_refused(folder, bucket, tmp_path):  # noqa: F811
    prepare_part(folder, f"{bucket}/set", (1, 2))
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    (other / "cat" / "more.png").write_bytes(image(77))
    with pytest.raises(ConfigError, match="was begun from another source"):
        prepare_part(other, f"{bucket}/set", (2, 2))
    (epath.Path(bucket) / "full" / "a.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty"):
        prepare_part(folder, f"{bucket}/full", (1, 1))
    with pytest.raises(ConfigError, match="there is no gs://|does not exist|no_images"):
        prepare_part(f"{bucket}/no_images", f"{bucket}/out", (1, 1))


def test_half_uploaded_files_are_found_and_named(folder, whole, bucket):  # noqa: F811
    upload(whole, bucket)
    half = epath.Path(bucket) / "train-00000-of-00002.array_record"
    half.write_bytes(half.read_bytes()[:65536])
    (epath.Path(bucket) / "test-00001-of-00002.array_record").unlink()
    (epath.Path(bucket) / "test-labels.npy").write_bytes(b"")
    bad = {one["name"]: one["why"] for one in verify(bucket)["bad"]}
    assert "65536 bytes, there should be 131072" in bad[half.name]
    assert bad["test-00001-of-00002.array_record"] == "the file is missing"
    assert bad["test-labels.npy"] == "its checksum has changed"


def test_a_full_disk_for_files_to_upload_is_a_sentence_that_names_it(
    folder, whole, bucket, monkeypatch, tmp_path  # noqa: F811
):  # fmt: skip
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    with monkeypatch.context() as patch:
        patch.setattr(work.shards, "write_shard", full)
        with pytest.raises(UserError, match=r"No space left on device in .* \(TMPDIR\)"):
            prepare_part(folder, f"{bucket}/set", (1, 1))
    left = tmp_path.glob("vit_jax-prepare-*")
    assert not any(any(one.iterdir()) for one in left)
    prepare_part(folder, f"{bucket}/set", (1, 1))
    assert content(f"{bucket}/set") == content(whole)


def test_faults_of_the_bucket_are_ridden_out(folder, whole, bucket, faults):  # noqa: F811
    upload(folder, f"{bucket}/raw")
    for kind in (
        {"kind": "status", "status": 503},
        {"kind": "reset"},
    ):
        faults.inject(**kind, every=11, times=2, methods=("GET", "POST", "PUT"))
    prepare_part(f"{bucket}/raw", f"{bucket}/set", (1, 1))
    faults.clear()
    assert content(f"{bucket}/set") == content(whole)


def test_killed_preparers_in_a_bucket_go_on_and_make_the_same_bytes(
    folder, whole, bucket, bucket_environment, faults  # noqa: F811
):  # fmt: skip
    # Of its four notes two are written, and no other, however often it is tried.
    later = {"after": 2, "methods": ("POST", "PUT")}
    faults.inject("stall", seconds=PATIENCE, path=r"\.array_record\.json", **later)
    command = [
        sys.executable,
        "-m",
        "vit_jax",
        "prepare",
        str(folder),
        "--shards=2",
        "--holdout=0.3",
    ]
    command += [f"--out={bucket}/set", "--json"]
    environment = os.environ | bucket_environment
    notes = epath.Path(bucket) / "set" / work.NOTES
    process = subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL)
    until(lambda: len(list(notes.glob("*.array_record.json"))) == 2, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    faults.clear()
    done = [subprocess.Popen([*command, f"--shard={i}/2"], env=environment) for i in (1, 2)]
    assert [process.wait(timeout=PATIENCE) for process in done] == [0, 0]
    assert content(f"{bucket}/set") == content(whole)
