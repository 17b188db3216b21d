"""The lock of the test environment: `tests/constraints.txt`, made by `tools/lock.py`, used by `tests/run.sh`."""

import importlib.metadata
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = pathlib.Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("lock", ROOT / "tools" / "lock.py")
lock = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(lock)
LINES = [line for line in lock.FILE.read_text().splitlines() if not line.startswith("#")]


def test_the_lock_holds_for_the_oldest_python_alone():
    """Later ones have another JAX."""
    markers = {str(Requirement(line).marker) for line in LINES}
    assert markers == {lock.MARKER}
    marker = Requirement(LINES[0]).marker
    versions = ("3.11", "3.12", "3.13")
    applies = {version: marker.evaluate({"python_version": version}) for version in versions}
    assert applies == {"3.11": True, "3.12": False, "3.13": False}


def test_the_lock_has_what_setup_py_asks_for_in_versions_that_it_allows():
    pinned = {r.name: r for r in map(Requirement, LINES)}
    # As setup.py asks on Python 3.11, whichever this is.
    for requirement in lock.asked("3.11"):
        (specifier,) = pinned[canonicalize_name(requirement.name)].specifier
        assert specifier.operator == "==" and requirement.specifier.contains(specifier.version)
    assert {"jax", "ray", "torch", "libtpu", *lock.ALONE} <= pinned.keys()


def test_what_is_installed_is_what_is_locked():
    """Also what those packages need in turn, none of which is missing in the lock."""
    assert lock.locked() == (lock.installed() if sys.version_info < (3, 12) else {})
    assert not lock.locked() or lock.locked()["jax"] == importlib.metadata.version("jax")


def test_the_test_extra_alone_is_installed_by_the_lock(tmp_path):
    """The commands of `launch/venv.sh`, with a pip that writes what it was asked for."""
    for name in ("launch/venv.sh", "setup.py", "tests/constraints.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)

    def asks(*extra: str) -> str:
        script = f"set -euo pipefail; . launch/venv.sh; use_venv {' '.join(extra)}"
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert re.search(r"--constraint=tests/constraints.txt --editable \.\[test\]$", asks("test"))
    assert asks("test") == ""  # Installed already.
    assert "constraint" not in asks() and asks("cuda12").endswith("--editable .[cuda12]\n")
    (tmp_path / "tests" / "constraints.txt").unlink()
    (tmp_path / ".venv" / "installed-test").unlink()
    assert asks("test").endswith("check --editable .[test]\n")
