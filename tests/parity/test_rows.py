"""The two cheapest rows whole, each in a process of one device. All rows: `python -m tests.parity ROW`."""

import os
import re
import subprocess
import sys

import pytest


def differing(name: str, first_seed: int) -> set[tuple[str, str]]:
    """The checks of a row that do not hold, and how each fails."""
    command = [sys.executable, "-m", "tests.parity", name, str(first_seed)]
    # With one device, and programs that are compiled as those of users.
    run = subprocess.run(
        command, env=os.environ | {"XLA_FLAGS": ""}, capture_output=True, text=True
    )
    print(run.stdout)
    found = re.findall(r"^  DIFFERS \[(.*?)\] (.*?):", run.stdout, flags=re.M)
    failed = {(check, how) for hows, check in found for how in hows.split(", ")}
    assert run.returncode == bool(failed), run.stderr
    return failed


@pytest.mark.slow
@pytest.mark.parametrize("name", ["batch", "plain"])
def test_the_law_is_that_of_the_other_engine(name, shared_data):
    """Of equal engines a check fails now and then: they differ if it fails in the same way with five other seeds."""
    pytest.importorskip("torch")
    from tests.parity import rows

    failed = differing(name, 0)
    assert not failed or not failed & differing(name, rows.SEEDS)
