"""Dry runs of `vit_jax launch`, and stand-ins for the programs that it calls."""

import os
import pathlib
import shlex

import pytest


@pytest.fixture
def shown(launch):
    """`shown(*words)`: the commands that a dry run prints, each as its words."""

    def shown(*words: str) -> list[list[str]]:
        split = words.index("--") if "--" in words else len(words)
        code, out, err = launch(*words[:split], "--dry_run", *words[split:])
        assert code == 0, err
        return [shlex.split(line) for line in out.splitlines() if not line.startswith("#")]

    return shown


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """`stand_in(program, script)`: a program of this name that runs a script of bash; its calls are in the file that is
    returned.
    """
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("FOLDER", str(tmp_path))

    def stand_in(program: str, script: str) -> pathlib.Path:
        path = tmp_path / program
        path.write_text(f'#!/usr/bin/env bash\necho "{program} $*" >> "$FOLDER/calls"\n{script}')
        path.chmod(0o755)
        return tmp_path / "calls"

    return stand_in
