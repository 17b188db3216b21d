"""Every argument that takes a place, given an address: it works, or a sentence and exit code 2 come
before anything is done.
"""

import os
import signal
import socket
import subprocess
import sys

import gcsfs
import pytest
import s3fs
from etils import epath

from tests.waiting import PATIENCE
from vit_jax.base import buckets, places
from vit_jax.base.errors import ConfigError
from vit_jax.training import guards

RECIPE = os.path.abspath("configs/digits.py")
TRAIN = ("train", f"--config={RECIPE}", "--config.duration=1 steps")
DATA = (*TRAIN, "--workdir=run")

ARGUMENTS = {
    "train --workdir": (*TRAIN, "--workdir={}"),
    "train config.data.path": (*DATA, "--config.data.name=folder", "--config.data.path={}"),
    "train config.data.path, prepared": (*DATA, "--config.data.name=prepared", "--config.data.path={}"),
    "train config.data.path, tar": (*DATA, "--config.data.name=tar", "--config.data.path={}"),
    "train config.data.mixture": (*DATA, "--config.data.name=mixture", "--config.data.mixture=(('{}',1.0),)"),
    "train config.compilation_cache": (*TRAIN, "--workdir=run", "--config.compilation_cache={}"),
    "train config.init_from": (*TRAIN, "--workdir=run", "--config.init_from={}"),
    "train --config": ("train", "--config={}", "--workdir=run"),
    "train --register": (*TRAIN, "--workdir=run", "--register={}"),
    "train --dry_run --workdir": (*TRAIN, "--dry_run", "--workdir={}"),
    "sweep --workdir": ("sweep", f"--config={RECIPE}", "--grid=optim.lr=0.1,0.2", "--workdir={}"),
    "vtab --workdir": ("vtab", "--checkpoint=x.npz", "--workdir={}"),
    "evaluate --checkpoint": ("evaluate", "--checkpoint={}"),
    "evaluate --data_dir": ("evaluate", "--checkpoint=x.npz", "--suite=imagenet", "--data_dir={}"),
    "predict IMAGE": ("predict", "--checkpoint=x.npz", "{}"),
    "predict --checkpoint": ("predict", "--checkpoint={}", "a.jpg"),
    "predict --picture": ("predict", "--checkpoint=x.npz", "--picture={}", "a.jpg"),
    "predict --features": ("predict", "--checkpoint=x.npz", "--features={}.npz", "a.jpg"),
    "exits --checkpoint": ("exits", "--checkpoint={}", "--budgets=1"),
    "export --checkpoint": ("export", "--checkpoint={}", "--to=onnx", "--out=a.onnx"),
    "export --out": ("export", "--checkpoint=x.npz", "--to=onnx", "--out={}.onnx"),
    "export --images": ("export", "--checkpoint=x.npz", "--to=onnx", "--out=a.onnx", "--images={}"),
    "serve --checkpoint": ("serve", "--checkpoint={}"),
    "inspect --checkpoint": ("inspect", "--checkpoint={}", "--images=a.jpg", "--out=report"),
    "inspect --images": ("inspect", "--checkpoint=x.npz", "--images={}", "--out=report"),
    "inspect --out": ("inspect", "--checkpoint=x.npz", "--images=a.jpg", "--out={}"),
    "report DIR": ("report", "{}", "--out=report"),
    "report --out": ("report", ".", "--out={}"),
    "benchmark --profile": ("benchmark", "step", f"--config={RECIPE}", "--profile={}"),
    "benchmark --checkpoint": ("benchmark", "inference", "--checkpoint={}", "--budget=1"),
    "show": ("show", "{}"),
    "convert SOURCE": ("convert", "{}", "a.npz", "--to=official"),
    "convert DESTINATION": ("convert", "x.npz", "{}", "--to=official"),
    "prepare SOURCE": ("prepare", "{}", "--out=set"),
    "prepare --out": ("prepare", "digits", "--out={}"),
    "prepare --data_dir": ("prepare", "digits", "--out=set", "--data_dir={}"),
    "prepare --verify": ("prepare", "{}", "--verify"),
}  # fmt: skip


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name, address",
    [
        (name, address)
        for name in ARGUMENTS
        for address in ("foo://host/a", "gs://nowhere/a")
        # It asks no bucket for a run that it does not start.
        if (name, address) != ("train --dry_run --workdir", "gs://nowhere/a")
    ],
)
def test_an_address_that_cannot_be_used_is_refused_before_anything_is_done(
    name, address, command, empty_folder, cloud_storage
):
    code, out, err = command(*(part.replace("{}", address) for part in ARGUMENTS[name]))
    sentence = err.strip().splitlines()[-1]
    assert code == 2 and address[:12] in sentence and sentence.startswith("vit_jax: "), err
    assert "Traceback" not in err and out == "" and not list(empty_folder.iterdir())


def test_a_workdir_below_an_object_is_refused(bucket):
    places.write_whole(epath.Path(f"{bucket}/a"), "text")
    with pytest.raises(ConfigError, match=f"--workdir={bucket}/a/run: {bucket}/a is an object"):
        guards.make_workdir(epath.Path(f"{bucket}/a/run"))


def forget_clients() -> None:
    """The next use of a bucket makes its client anew, by the environment."""
    buckets.client.cache_clear()
    gcsfs.GCSFileSystem.clear_instance_cache()
    s3fs.S3FileSystem.clear_instance_cache()


@pytest.fixture
def silent(cloud_storage, s3, monkeypatch):
    """The address of a server of all buckets that takes connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        for name in ("STORAGE_EMULATOR_HOST", "AWS_ENDPOINT_URL"):
            monkeypatch.setenv(name, address)
        forget_clients()
        yield address
    forget_clients()


@pytest.mark.parametrize(
    ("name", "scheme", "restarts", "expected"),
    [
        ("show", "gs", "0", 2),
        ("show", "s3", "0", 2),
        ("train config.data.path, prepared", "gs", "0", 2),
        ("show", "gs", "1", 42),  # of a run that is started again
    ],
)
def test_a_bucket_that_does_not_answer_is_a_sentence(
    name, scheme, restarts, expected, silent, command, empty_folder, monkeypatch
):
    assert buckets.PATIENCE_SECONDS < 20
    monkeypatch.setattr(buckets, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setenv("VIT_JAX_RESTARTS", restarts)
    code, out, err = command(*(part.format(f"{scheme}://bucket/run") for part in ARGUMENTS[name]))
    assert code == expected and "Traceback" not in err and not out, err
    assert f"{scheme}://bucket: no answer from {silent}" in err.splitlines()[-1]


def test_a_command_that_waits_for_a_bucket_is_stopped_at_once(bucket_environment):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen(100)
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        process = subprocess.Popen(
            [sys.executable, "-m", "vit_jax", "show", "gs://bucket/run"],
            env=os.environ | bucket_environment | {"STORAGE_EMULATOR_HOST": address},
            stderr=subprocess.PIPE,
        )
        asking, _ = server.accept()
        with asking:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=PATIENCE)  # no answer has come
    assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize("scheme", ["gs", "s3"])
@pytest.mark.parametrize("status, problem", [(403, "no permission"), (401, "no credentials")])
def test_a_bucket_that_this_account_may_not_read_is_reported(status, problem, scheme, request):
    made = request.getfixturevalue({"gs": "bucket", "s3": "s3_bucket"}[scheme])
    request.getfixturevalue({"gs": "faults", "s3": "s3_faults"}[scheme]).inject(
        "status", status=status
    )
    problem = "no permission" if scheme == "s3" else problem  # It has keys, which are refused.
    with pytest.raises(ConfigError, match=f"--workdir={made}: {problem}"):
        places.locate(f"{made}/run", "--workdir")


def test_without_keys_for_s3_it_says_how_to_have_some(s3_bucket, command, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    forget_clients()
    code, _, err = command("show", f"{s3_bucket}/run")
    forget_clients()
    assert code == 2 and "no credentials on this machine: run 'aws configure'" in err
