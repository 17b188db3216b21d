"""What is written is whole or not there, and what was changed in place is read again."""

import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.models.conftest import parameters
from tests.waiting import PATIENCE
from vit_jax.base import outputs
from vit_jax.base.errors import CheckpointError, ConfigError
from vit_jax.interchange import formats
from vit_jax.models import registry

_SLOW = """
import sys, time
import numpy as np
from vit_jax.interchange import npz

def arrays():
    yield "a", np.zeros(3)
    print("begun", flush=True)
    time.sleep(10_000)

npz.write(sys.argv[1], arrays())
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_a_killed_writer_leaves_nothing_or_what_the_next_one_removes(by, tmp_path):
    target = tmp_path / "model.npz"
    writer = subprocess.Popen([sys.executable, "-c", _SLOW, target], stdout=subprocess.PIPE)
    assert writer.stdout.readline() == b"begun\n"
    writer.send_signal(by)
    writer.wait(PATIENCE)
    left = [path.name for path in tmp_path.iterdir()]
    assert left == ([] if by == signal.SIGTERM else [f".model.npz.partial-{writer.pid}"])
    with outputs.written_whole(target) as partial:
        partial.write_bytes(b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["model.npz"]


def test_what_another_process_is_writing_stays(tmp_path):
    other = tmp_path / f".model.npz.partial-{os.getppid()}"
    other.write_bytes(b"x")
    with outputs.written_whole(tmp_path / "model.npz") as partial:
        partial.write_bytes(b"y")
    assert other.exists()


def checkpoint(value: float) -> formats.LoadedCheckpoint:
    config = registry.model_config("ViT-mu/4", image_size=8, num_classes=2, activation="gelu")
    params = parameters(config)
    params["head"]["bias"] = np.full(2, value, np.float32)
    return formats.LoadedCheckpoint(config, params)


def test_a_file_written_again_within_the_second_is_read_again(tmp_path):
    path = tmp_path / "model.safetensors"
    for value in (1.0, 2.0):
        formats.write_checkpoint(checkpoint(value), path, "timm")
        now = int(time.time())
        os.utime(path, (now, now))
        assert np.asarray(formats.read_checkpoint(path).params["head"]["bias"])[0] == value


def test_a_folder_that_was_mended_after_a_refusal_is_read(tmp_path):
    config, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    formats.write_checkpoint(checkpoint(1.0), weights, "timm")
    arguments = {"img_size": 8, "patch_size": 4, "depth": 1, "embed_dim": 32, "num_heads": 2}
    said = {"architecture": "vit_tiny_patch16_224", "num_classes": 2, "model_args": arguments}
    good = json.dumps(said)
    config.write_text(good.replace('"patch_size": 4', '"patch_size": 8'))
    stamp = config.stat().st_mtime
    with pytest.raises((CheckpointError, ConfigError)):
        formats.read_checkpoint(tmp_path)
    config.write_text(good)
    os.utime(config, (stamp, stamp))
    assert formats.read_checkpoint(tmp_path).model_config.patch == 4


@pytest.mark.parametrize("name", ["model.safetensors", "model.npz", "run"])
def test_a_state_dict_that_has_no_effect_is_refused(name, tmp_path):
    form = {"model.safetensors": "timm", "model.npz": "timm", "run": "orbax"}[name]
    if name == "model.npz":
        np.savez(tmp_path / name, x=np.zeros(1))
    else:
        formats.write_checkpoint(checkpoint(1.0), tmp_path / name, form)
    with pytest.raises(ConfigError, match="#state_dict=foo has no effect"):
        formats.read_checkpoint(f"{tmp_path / name}#state_dict=foo")
