"""The two cheapest rows whole, each in a process of one device. All rows: `python -m tests.parity run ROW`."""

import os
import subprocess
import sys

import pytest

from tests.parity import rows


def run(*arguments) -> str:
    """What `python -m tests.parity` prints."""
    # With one device, and programs that are compiled as those of users.
    environment = os.environ | {"XLA_FLAGS": ""}
    command = [sys.executable, "-m", "tests.parity", *map(str, arguments)]
    finished = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


@pytest.mark.slow
def test_what_is_drawn_for_a_batch_is_what_timm_draws(shared_data):
    printed = run("run", "batch")
    assert printed.count("no difference found") == 27
    assert "DIFFERS" not in printed


@pytest.mark.slow
def test_runs_of_the_plain_recipe_end_where_those_of_flax_and_optax_end(shared_data, tmp_path):
    run("run", "plain", "--first_seed=0", "--seeds=5", f"--folder={tmp_path}")
    judged = rows.judge(["plain"], tmp_path, seeds=5)
    assert [difference.number for difference, _ in judged] == ["end", "area"]
    assert not any(differs for _, differs in judged), judged
