"""`gs://` against a server of Cloud Storage's interface on this machine."""

import json

import jax
import numpy as np
import pytest
from etils import epath
from jax.experimental.compilation_cache import compilation_cache

import vit_jax
from tests.integration.conftest import TINY, write_image
from vit_jax.base import places
from vit_jax.base.errors import ConfigError
from vit_jax.checkpoints import reading
from vit_jax.interchange import formats, loading
from vit_jax.training.loop import train

from ..interchange.conftest import official_vit
from .test_train import assert_same_bits, params_of


@pytest.fixture(scope="module")
def run(cloud_storage):
    """A run in the bucket, stopped after 8 of its 12 steps and started again."""
    bucket = cloud_storage.new_bucket()
    config = vit_jax.load_config("configs/digits.py")
    options = {"compilation_cache": f"{bucket}/cache", "log.tensorboard": True}
    config.update_from_flattened_dict(TINY | options)
    jax.random.key(0)  # compiled before a run names its folder of programs
    compilation_cache.reset_cache()  # of this process, which keeps the folder that it used first
    config.log.profile = (2, 3)
    workdir = epath.Path(bucket) / "runs" / "tiny"
    train(config, workdir)
    yield workdir, config
    compilation_cache.reset_cache()


def tensors(path):
    return jax.tree.map(np.asarray, formats.read_checkpoint(path).params)


@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_every_format_is_written_to_a_bucket_and_read_from_it(scheme, request, tmp_path):
    bucket = request.getfixturevalue({"gs": "bucket", "s3": "s3_bucket"}[scheme])
    np.savez(tmp_path / "vit.npz", **official_vit())
    folder = epath.Path(bucket) / "formats"
    expected = tensors(tmp_path / "vit.npz")
    names = {"official": "a.npz", "big_vision": "b.npz", "huggingface": "hf", "timm": "timm"}
    if scheme == "gs":
        names["orbax"] = "run"
    for to, name in names.items():
        loading.convert(tmp_path / "vit.npz", folder / name, to)
        back = tmp_path / f"{to}.npz"
        loading.convert(f"{folder}/{name}", back, "official")
        if to != "big_vision":  # Its class token holds its position.
            jax.tree.map(np.testing.assert_array_equal, tensors(back), expected)
    there = sorted(path.name for path in folder.iterdir())
    assert there == sorted(names.values())
    model = vit_jax.load(str(folder / "a.npz"))
    np.testing.assert_array_equal(model.class_token, official_vit()["cls"])


def test_a_run_in_a_bucket_has_all_files_there(run):
    """That its bits are those of a run in a folder is of `test_bucket_faults.py`."""
    workdir, _ = run
    assert json.loads((workdir / "result.json").read_text())["step"] == 12
    assert list((workdir.parent.parent / "cache").iterdir())  # compiled programs
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
    assert (
        reading.find_checkpoint(workdir).name == "8"
        and reading.newest_description(workdir) is not None
    )
    for file in (steps / "8" / "state" / "ocdbt.process_0" / "d").iterdir():
        file.write_bytes(b"\0" * file.stat().length)
    train(config, workdir)
    assert_same_bits(params_of(workdir), expected)
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 4, 8, 12, 12, 8, 12, 12]


def test_a_bucket_that_does_not_exist_is_reported_before_the_run(run):
    with pytest.raises(ConfigError, match="--workdir=gs://nowhere: there is no such bucket"):
        train(run[1], "gs://nowhere/run")


@pytest.fixture
def copied(finished_run, s3_bucket):
    """A run in a folder, and its copy with the last checkpoint on S3."""
    local = finished_run.workdir
    for file in places.files_below(local):
        if not file.path.startswith((f"{local}/checkpoints/4/", f"{local}/checkpoints/8/")):
            places.upload(file.path, f"{s3_bucket}/run{file.path.removeprefix(str(local))}")
    return local, f"{s3_bucket}/run"


def test_a_run_copied_to_s3_is_read_from_there(copied, s3_bucket, command):
    local, copy = copied
    assert_same_bits(params_of(epath.Path(copy)), params_of(local))
    assert vit_jax.load_run(copy).step == 12
    code, out, err = command("show", copy, "--json")
    assert code == 0 and json.loads(out)["path"] == f"{copy}/checkpoints/12", err
    code, out, err = command("convert", copy, f"{s3_bucket}/a.npz", "--to=official")  # fmt: skip
    assert code == 0 and places.exists(f"{s3_bucket}/a.npz"), err
    code, out, err = command("report", copy, f"--out={s3_bucket}/report")
    assert code == 0 and places.exists(f"{s3_bucket}/report/report.html"), err


def test_images_are_predicted_from_s3_and_features_and_pictures_written_there(
    copied, s3_bucket, command, tmp_path
):
    write_image(tmp_path / "a.png")
    for name in ("images/a.png", "images/b/c.png"):
        places.upload(tmp_path / "a.png", f"{s3_bucket}/{name}")
    images = f"{s3_bucket}/images"
    run = f"--checkpoint={copied[1]}"
    code, out, err = command("predict", run, images, f"--picture={s3_bucket}/p.png", "--json")
    files = [one["file"] for one in json.loads(out)]
    assert code == 0 and files == [f"{images}/a.png", f"{images}/b/c.png"], err
    code, out, err = command("predict", run, f"{images}/*.png", f"--features={s3_bucket}/f.npz")
    assert code == 0 and "1 x 32" in out, err
    assert places.exists(f"{s3_bucket}/p.png") and places.exists(f"{s3_bucket}/f.npz")
    code, _, err = command("predict", run, f"{images}/nothing.png")
    assert code == 1 and "1 of 1 images cannot be read" in err and "Traceback" not in err


def test_saving_to_s3_is_refused_with_the_way(s3_bucket, command):
    code, out, err = command("train", "--config=configs/digits.py", f"--workdir={s3_bucket}/run")
    assert code == 2 and f"--workdir={s3_bucket}/run: Orbax" in err and "aws s3 sync" in err
