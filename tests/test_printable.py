"""Names that come from strangers do not control the terminal."""

import io
import logging as python_logging

import absl.logging
import cv2
import jax
import numpy as np
import pytest

from vit_jax.base import logs
from vit_jax.interchange import formats
from vit_jax.models import registry

CLEAR = "\x1b[2J\x1b]0;title\x07"  # clears the screen, and names the window


@pytest.fixture
def checkpoint(tmp_path):
    """A file whose classes and own name have control characters."""
    config = registry.model_config(
        "ViT-mu/4", image_size=8, depth=1, num_classes=2, activation="gelu"
    )
    parameters = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), registry.abstract(config)[1])
    prepared = formats.Preprocessing(8, (0.5,) * 3, (0.5,) * 3, "torchvision", 8, "bicubic")
    found = formats.LoadedCheckpoint(config, parameters, ("cat" + CLEAR, "dog\u202e"), prepared)
    path = tmp_path / f"model{CLEAR.replace('/', '')}.safetensors"
    formats.write_checkpoint(found, path, "timm")
    return path


def test_names_of_a_checkpoint_are_printed_with_their_control_characters_escaped(
    checkpoint, tmp_path, command
):
    (tmp_path / "photos").mkdir()
    assert cv2.imwrite(str(tmp_path / f"photos/a{CLEAR}.png"), np.zeros((8, 8, 3), np.uint8))
    for form in ((), ("--csv",)):
        code, out, _ = command("predict", f"--checkpoint={checkpoint}", tmp_path / "photos", *form)
        assert code == 0 and "\x1b" not in out and "\u202e" not in out
        assert r"cat\x1b[2J\x1b]0;title\x07" in out and r"dog\u202e" in out and r"a\x1b[2J" in out
    code, out, _ = command("show", checkpoint)
    assert code == 0 and "\x1b" not in out


def test_errors_and_log_lines_are_too(tmp_path, command, monkeypatch):
    code, _, err = command("show", f"{tmp_path}/no{CLEAR}.npz")
    assert code == 1 and "\x1b" not in err and r"no\x1b[2J" in err
    handler = absl.logging.get_absl_handler()
    monkeypatch.setattr(handler.python_handler, "stream", stream := io.StringIO())
    logs.to_stderr()
    record = python_logging.LogRecord("absl", 30, __file__, 1, "image %s", (CLEAR,), None)
    handler.handle(record)
    assert stream.getvalue().endswith("image \\x1b[2J\\x1b]0;title\\x07\n")


def test_what_is_no_control_character_stays():
    text = "Café 猫 🐈 מים\n\tπ"
    assert logs.printable(text) == text
    assert logs.printable("a\udcff\r\x9b") == r"a\udcff\r\x9b"
