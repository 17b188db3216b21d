"""Other Python processes of ours import nothing from the folder in which they are started."""

import pathlib
import subprocess

import pytest

from vit_jax.base import subprocesses

PACKAGE = pathlib.Path(subprocesses.__file__).parents[1]


@pytest.mark.parametrize("searched", [False, True])
def test_a_module_of_ours_is_found_and_files_beside_which_it_is_started_are_not(
    tmp_path, monkeypatch, searched
):
    (tmp_path / "dataclasses.py").write_text("print('imported')")
    (tmp_path / "vit_jax.py").write_text("print('imported')")
    monkeypatch.chdir(tmp_path)
    if searched:  # as by `python -m vit_jax` there
        monkeypatch.syspath_prepend(str(tmp_path))
    command, environment = subprocesses.python_module("vit_jax.devices.chips")
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_file_starts_a_module_without_that():
    texts = {path.name: path.read_text() for path in PACKAGE.rglob("*.py")}
    assert [name for name, text in texts.items() if 'sys.executable, "-m"' in text] == []
