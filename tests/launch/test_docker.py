"""The Dockerfiles, without Docker: a linter, and what their steps need."""

import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "launch" / "docker").glob("*.Dockerfile"))


def steps(path: pathlib.Path) -> list[tuple[str, str]]:
    """(instruction, arguments) of each line."""
    lines = [line for line in path.read_text().splitlines() if line and not line.startswith("#")]
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines]


def test_there_is_one_for_each_kind_of_device_and_hadolint_finds_no_fault():
    assert [path.stem for path in FILES] == ["cpu", "cuda", "tpu"]
    assert (ROOT / "launch/gke/Dockerfile").samefile(FILES[-1])  # its earlier place
    program = pathlib.Path(sys.executable).with_name("hadolint")
    done = subprocess.run([program, *FILES], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_copied_before_packages_are_installed_suffices_for_setup_py(path, tmp_path):
    instructions = steps(path)
    names = [name for name, _ in instructions]
    install = names.index("RUN")
    for name, arguments in instructions[:install]:
        *sources, target = arguments.split()
        for source in sources if name == "COPY" else ():
            (tmp_path / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "setup.py", "--quiet", "--name"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.split() == ["vit_jax"], done.stderr
    pip = instructions[install][1]
    assert (tmp_path / re.search(r"--constraint=(\S+)", pip)[1]).exists()
    extras = re.findall(r"\w+", "".join(re.findall(r"\[(.*)\]", pip)))
    setup = (ROOT / "setup.py").read_text()
    assert extras == [extra for extra in extras if f'"{extra}": ' in setup]
    assert names.index("COPY", install) and "USER" in names or path.stem == "tpu"


def test_their_python_is_the_one_of_the_lock():
    """tests/constraints.txt is for Python 3.11."""
    bases = {arguments for path in FILES for name, arguments in steps(path) if name == "ARG"}
    assert bases == {"BASE=python:3.11-slim-bookworm"}
