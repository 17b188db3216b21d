"""What a path is, and the primitives on it: the same in a folder and in buckets."""

import json
import os
import subprocess
import sys

import pytest
from etils import epath

from vit_jax.base import places
from vit_jax.base.errors import ConfigError


@pytest.fixture(params=["folder", "gs", "s3"])
def folder(request, tmp_path):
    """An empty folder, or an empty bucket."""
    if request.param == "folder":
        return tmp_path
    return epath.Path(request.getfixturevalue({"gs": "bucket", "s3": "s3_bucket"}[request.param]))


def test_a_file_is_written_read_listed_described_and_removed_in_every_place(folder, tmp_path):
    place = places.locate(folder / "a" / "b.bin", "--out")
    if not places.in_bucket(folder):
        place.parent.mkdir()
    places.write_whole(place, bytes(range(256)))
    assert places.exists(place) and places.read_bytes(place) == bytes(range(256))
    assert places.read_bytes(place, 10, 3) == bytes([10, 11, 12])
    with places.open_bytes(place) as file:
        file.seek(100)
        assert file.read(2) == bytes([100, 101])
    with pytest.raises(OSError, match="expected 9 bytes from 250"):
        places.read_bytes(place, 250, 9)
    before = places.describe_file(place)
    assert before.size == 256
    (tmp_path / "local").write_bytes(b"other")
    places.upload(tmp_path / "local", place)
    after = places.describe_file(place)
    assert places.read_bytes(place) == b"other" and after.identity != before.identity
    places.write_whole(folder / "a" / "a.txt", "text")
    found = [(file.path, file.size) for file in places.files_below(folder / "a")]
    assert found == [(str(folder / "a" / "a.txt"), 4), (str(place), 5)]
    assert list(places.files_below(folder / "nothing")) == []
    places.remove(place)
    assert not places.exists(place) and places.exists(folder / "a")
    places.remove(place)
    places.remove(folder / "a")
    assert not places.exists(folder / "a")
    with pytest.raises(FileNotFoundError):
        places.describe_file(place)
    with pytest.raises(FileNotFoundError):
        places.read_bytes(place)


def test_local_paths_are_absolute_and_those_of_buckets_stay(bucket):
    assert str(places.locate("a/b")) == os.path.abspath("a/b")
    assert str(places.locate("~/a")) == os.path.expanduser("~/a")
    assert str(places.locate(f"{bucket}/run")) == f"{bucket}/run"
    for text in ("file:///tmp/a%20b", "file:/tmp/a b", "file://localhost/tmp/a b"):
        assert str(places.locate(text)) == "/tmp/a b"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("https://host/a.jpg", "cannot be at https://"),
        ("foo://a", "cannot be at foo://"),
        ("hf://owner/name", "hf download"),
        ("file://tmp/a", "file:///tmp/a"),
        ("gs:/bucket/a", "two slashes: gs://bucket/a"),
        ("gs://", "no name of a bucket"),
        ("gs:///a", "no name of a bucket"),
        ("gs://Bucket/a", "'Bucket' is no name of a bucket"),
        ("s3://bucket/a/../b", r"no '\.' or '\.\.'"),
    ],
)
def test_what_is_no_path_is_refused_before_anything_is_asked(text, problem):
    with pytest.raises(ConfigError, match=f"--out={text}: .*{problem}"):
        places.locate(text, "--out")


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_bucket_that_does_not_exist_is_reported(scheme, cloud_storage, s3):
    with pytest.raises(ConfigError, match=f"--workdir={scheme}://nowhere: there is no such bucket"):
        places.locate(f"{scheme}://nowhere/run", "--workdir")


def test_without_a_home_no_folder_called_tilde_is_made(tmp_path):
    code = """
import os
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
os.setuid(12345)
assert not places.has_home()
for path in ("~/x", "~"):
    for function in (places.locate, places.absolute):
        try:
            print(function(path, "--workdir"))
        except ConfigError as error:
            print(error)
"""
    environment = {name: value for name, value in os.environ.items() if name != "HOME"}
    if os.getuid():
        pytest.skip("only root can take the number of a user without an entry")
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=tmp_path
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert all(line.startswith("--workdir=~") and "set HOME" in line for line in lines)
    assert list(tmp_path.iterdir()) == []


def test_numbers_that_are_not_finite_are_null_in_files():
    value = {
        "a": [1.5, float("nan")],
        "b": {"c": float("inf"), "d": None, "e": "NaN"},
        "f": (2, True),
    }
    text = places.json_text(value)
    expected = {"a": [1.5, None], "b": {"c": None, "d": None, "e": "NaN"}, "f": [2, True]}
    assert json.loads(text) == expected
