"""`gs://` against a server of Cloud Storage's interface on this machine."""

import json

import jax
import numpy as np
import pytest
from etils import epath

import vit_jax
from tests.integration.conftest import TINY
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats, loading
from vit_jax.training.loop import train

from ..interchange.conftest import official_vit
from .test_train import assert_same_bits, params_of


@pytest.fixture(scope="module")
def run(cloud_storage, tmp_path_factory):
    """A run in the bucket, stopped after 8 of its 12 steps and started again."""
    config = vit_jax.load_config("configs/digits.py")
    config.update_from_flattened_dict(
        TINY | {"compilation_cache": str(tmp_path_factory.mktemp("x"))}
    )
    config.log.profile = (2, 3)
    workdir = epath.Path(cloud_storage.new_bucket()) / "runs" / "tiny"
    train(config, workdir)
    return workdir, config


def tensors(path):
    return jax.tree.map(np.asarray, formats.read(path).params)


def test_every_format_is_written_to_a_bucket_and_read_from_it(bucket, tmp_path):
    np.savez(tmp_path / "vit.npz", **official_vit())
    folder = epath.Path(bucket) / "formats"
    expected = tensors(tmp_path / "vit.npz")
    for to, name in {
        "official": "a.npz", "big_vision": "b.npz", "huggingface": "hf", "timm": "timm", "orbax": "run",
    }.items():  # fmt: skip
        loading.convert(tmp_path / "vit.npz", folder / name, to)
        back = tmp_path / f"{to}.npz"
        loading.convert(f"{folder}/{name}", back, "official")
        if to != "big_vision":  # Its class token holds its position.
            jax.tree.map(np.testing.assert_array_equal, tensors(back), expected)
    there = sorted(path.name for path in folder.iterdir())
    assert there == ["a.npz", "b.npz", "hf", "run", "timm"]
    model = vit_jax.load(str(folder / "a.npz"))
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


def test_a_bucket_that_does_not_exist_is_reported_before_the_run(run):
    with pytest.raises(ConfigError, match="--workdir=gs://nowhere: there is no such bucket"):
        train(run[1], "gs://nowhere/run")
