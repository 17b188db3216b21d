"""Building the compiled part: where it cannot be, and with every compiler that is there."""

import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_an_install_without_a_c_compiler_goes_on_and_says_what_is_lost(tmp_path):
    build = [sys.executable, "setup.py", "--quiet", "build_ext", f"--build-lib={tmp_path}"]
    done = subprocess.run(
        [*build, f"--build-temp={tmp_path}"], cwd=ROOT, env=os.environ | {"CC": "/bin/false"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0 and not list(tmp_path.rglob("*.so"))
    assert "WARNING: the compiled JPEG decoder was not built: " in done.stderr
    assert "40 % of the speed" in done.stderr and "apt-get install gcc" in done.stderr
