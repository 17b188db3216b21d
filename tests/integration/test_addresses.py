"""Every argument that takes a place, given an address: it works, or a sentence and exit code 2 come
before anything is done.
"""

import os

import pytest

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
