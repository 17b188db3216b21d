"""WORKDIR/best, WORKDIR/last and WORKDIR@STEP in commands, of runs in folders and buckets that keep one checkpoint."""

import json
import os
import subprocess
import sys
import urllib.request

import pytest

import vit_jax
from tests.integration.conftest import write_image
from vit_jax.checkpoints import reading

NAMES = ("/best", "/last", "@4", "@8")


@pytest.fixture(params=["folder", "bucket"])
def workdir(request, tiny_config, tmp_path):
    """A run whose first evaluation is the best: of two checkpoints one is kept as the last, the other as the best."""
    place = str(tmp_path) if request.param == "folder" else request.getfixturevalue("bucket")
    config = tiny_config(
        duration="8 steps", eval__every="4 steps", eval__best="examples:max", checkpoint__best=True,
        checkpoint__keep=1,
    )  # fmt: skip
    vit_jax.train(config, f"{place}/run")
    assert reading.saved_steps(reading.places.locate(f"{place}/run") / reading.FOLDER) == [4, 8]
    return f"{place}/run"


@pytest.mark.slow
def test_commands_take_each_name_of_a_checkpoint(workdir, command, tmp_path):
    write_image(tmp_path / "image.png")
    steps = []
    for name in NAMES:
        path = f"{workdir}{name}"
        code, out, err = command("show", path, "--json")
        assert code == 0, err
        steps.append(json.loads(out)["step"])
        for arguments in (
            ("predict", f"--checkpoint={path}", tmp_path / "image.png"),
            ("evaluate", f"--checkpoint={path}"),
        ):
            code, _, err = command(*arguments)
            assert code == 0, err
        serve = ("-m", "vit_jax", "serve", f"--checkpoint={path}", "--port=0", "--json")
        with subprocess.Popen(
            [sys.executable, *serve], stdout=subprocess.PIPE, text=True, env=os.environ | {"XLA_FLAGS": ""}
        ) as server:  # fmt: skip
            try:
                url = json.loads(server.stdout.readline())["url"]
                with urllib.request.urlopen(url) as page:
                    assert page.status == 200
            finally:
                server.kill()
    assert steps == [4, 8, 4, 8]
    code, _, err = command("predict", f"--checkpoint={workdir}@6", tmp_path / "image.png")
    assert code == 1 and "its steps are: 4, 8" in err
