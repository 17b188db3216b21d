"""Damaged files: of each comes a result or the one error that is expected, within little memory."""

import json
import subprocess
import sys

import pytest

MOST_MEGABYTES = 200  # images may have 2^20 pixels


def fuzzed(what: str, *flags: str) -> dict:
    command = [sys.executable, "-m", "tests.fuzz", what, *flags]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["refused"] > result["files"] / 4 and result["megabytes"] < MOST_MEGABYTES, result
    return result


def test_of_a_damaged_image_comes_an_image_or_a_bad_image():
    assert fuzzed("images", "--count=60")["slowest_seconds"] < 2


def test_of_a_damaged_checkpoint_comes_a_model_or_a_checkpoint_error():
    pytest.importorskip("torch", reason="torch.save makes the files")
    assert fuzzed("checkpoints", "--count=15")["slowest_seconds"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("what, minutes", [("images", 50), ("checkpoints", 10)])
def test_nor_does_anything_else_come_in_an_hour(what, minutes):
    assert fuzzed(what, f"--seconds={60 * minutes}", "--seed=7")["files"] > 1000
