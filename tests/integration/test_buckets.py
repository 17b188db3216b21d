"""`gs://` against a server of Cloud Storage's interface on this machine.

To run these tests: `pip install gcsfs gcp-storage-emulator`; without them they are skipped.
"""

import importlib.util
import json
import os
import socket

import jax
import numpy as np
import pytest
from etils import epath

import vit_jax
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats, loading
from vit_jax.training.loop import train

from ..interchange.conftest import official_vit
from .test_train import assert_same_bits, params_of

INSTALLED = importlib.util.find_spec("gcsfs") is not None


@pytest.fixture(scope="module")
def bucket():
    """An empty bucket, to which gcsfs and TensorStore are pointed."""
    pytest.importorskip("gcsfs")
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    from gcp_storage_emulator.handlers import objects

    def move(request, response, storage, *_):
        """What gcsfs asks for first to rename a file; the emulator has copying and removing."""
        name, old, new = (request.params[k] for k in ("bucket_name", "object_id", "new_id"))
        response.json(objects._copy(request.base_url, storage, name, old, name, new))
        storage.delete_file(name, old)

    route = r"^/storage/v1/b/(?P<bucket_name>[-.\w]+)/o/(?P<object_id>.+)/moveTo/o/(?P<new_id>.+)$"
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(emulator, "HANDLERS", ((route, {"POST": move}), *emulator.HANDLERS))
        address = f"http://localhost:{port}"
        for name, value in {
            "STORAGE_EMULATOR_HOST": address,
            "TENSORSTORE_GCS_HTTP_URL": address,
            "GOOGLE_AUTH_TOKEN_FOR_TESTING": "nobody",
        }.items():
            patch.setenv(name, value)
        import fsspec
        import gcsfs

        fsspec.config.conf["gcs"] = {"token": "anon"}
        # Its default class first asks Google by gRPC what kind of bucket it is.
        fsspec.register_implementation("gcs", gcsfs.core.GCSFileSystem, clobber=True)
        server = emulator.create_server("localhost", port, in_memory=True, default_bucket="bucket")
        server.start()
        yield epath.Path("gs://bucket")
        server.stop()


@pytest.fixture(scope="module")
def run(bucket, tmp_path_factory):
    """A run in the bucket, stopped after 8 of its 12 steps and started again."""
    from tests.integration.conftest import TINY

    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY | {"compilation_cache": str(tmp_path_factory.mktemp("x"))}
    )
    config.log.profile = (2, 3)
    workdir = bucket / "runs" / "tiny"
    train(config, workdir)
    return workdir, config


def tensors(path):
    return jax.tree.map(np.asarray, formats.read(path).params)


def test_every_format_is_written_to_a_bucket_and_read_from_it(bucket, tmp_path):
    np.savez(tmp_path / "vit.npz", **official_vit())
    expected = tensors(tmp_path / "vit.npz")
    for to, name in {
        "official": "a.npz", "big_vision": "b.npz", "huggingface": "hf", "timm": "timm", "orbax": "run",
    }.items():  # fmt: skip
        loading.convert(tmp_path / "vit.npz", bucket / "formats" / name, to)
        back = tmp_path / f"{to}.npz"
        loading.convert(f"gs://bucket/formats/{name}", back, "official")
        if to != "big_vision":  # Its class token holds its position.
            jax.tree.map(np.testing.assert_array_equal, tensors(back), expected)
    there = sorted(path.name for path in (bucket / "formats").iterdir())
    assert there == ["a.npz", "b.npz", "hf", "run", "timm"]
    model = vit_jax.load("gs://bucket/formats/a.npz")
    np.testing.assert_array_equal(model.class_token, official_vit()["cls"])


def test_a_run_in_a_bucket_is_that_in_a_folder(run, tmp_path):
    workdir, config = run
    local = train(config, tmp_path)
    assert_same_bits(params_of(workdir), params_of(tmp_path))
    told = json.loads((workdir / "result.json").read_text())
    assert told["accuracy"] == local["accuracy"] and told["step"] == 12
    assert list((workdir / "tensorboard").glob("events*"))
    assert list((workdir / "profile").glob("plugins/profile/*/*.xplane.pb"))
    assert vit_jax.load_run(str(workdir)).step == 12
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 12]


def test_a_run_in_a_bucket_goes_on_from_its_last_whole_checkpoint(run, tmp_path):
    workdir, config = run
    expected = params_of(workdir)
    steps = workdir / "checkpoints"
    # The last was being written when the machine was taken away, the one before was damaged since.
    (steps / "12" / "commit_success.txt").unlink()
    assert reading.find(workdir).name == "8" and reading.newest_description(workdir) is not None
    for file in (steps / "8" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(b"\0" * file.stat().length)
    train(config, workdir)
    assert_same_bits(params_of(workdir), expected)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 12, 5, 8, 12, 12]


def test_a_bucket_that_is_not_there_is_told_before_the_run(bucket, run):
    with pytest.raises(ConfigError, match="cannot write to --workdir=gs://nowhere/run"):
        train(run[1], "gs://nowhere/run")


@pytest.mark.skipif(INSTALLED, reason="gcsfs is installed")
def test_without_the_package_for_buckets_it_is_named():
    with pytest.raises(ConfigError, match=r"gs://bucket/run: .* pip install 'vit_jax\[gcs\]'"):
        places.locate("gs://bucket/run")


def test_local_paths_are_absolute_and_those_of_buckets_stay():
    assert str(places.locate("a/b")) == os.path.abspath("a/b")
    assert str(places.locate("~/a")) == os.path.expanduser("~/a")
    if INSTALLED:
        assert str(places.locate("gs://bucket/run")) == "gs://bucket/run"
