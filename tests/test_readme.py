"""The README as a newcomer reads it: its commands in their order, what the first ones print, and its figures. Each
command alone is tested in `test_docs.py`, launches in `launch/test_guides.py`.
"""

import os
import pathlib
import re
import shutil
import subprocess

import cv2
import numpy as np
import pytest
from sklearn.datasets import load_digits

from tests.guide_commands import ROOT, lines_of

README = ROOT / "README.md"
TEXT = README.read_text()
# What the reader has before the first line.
READERS = {"photos"}
NOT_CLONED = (".git", ".venv*", "__pycache__", "runs", "site", "dist", "build", "*.egg-info")


def blocks(*languages: str) -> list[tuple[str, str]]:
    """(language, text) of the README's blocks of code in these languages."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.M | re.S)
    return [(language, text) for language, text in found if language in languages]


def folders_of(words: list[str], flags: tuple[str, ...]) -> set[str]:
    """The values of these flags in a command."""
    pairs = [word.split("=", 1) for word in words if "=" in word]
    return {value for flag, value in pairs if flag in flags}


def test_every_run_that_the_readme_uses_is_made_by_a_line_above():
    made = set(READERS)
    for where, words in lines_of(README):
        if "launch" in words:  # It prints a command for another machine.
            continue
        used = folders_of(words, ("--checkpoint", "--config.init_from", "--images"))
        assert used <= made, where
        made |= folders_of(words, ("--workdir", "--out"))
        if "classify" in words:
            made.add("photos-classified/run")
    (_, python), *others = blocks("python")
    assert not others and set(re.findall(r'load_run\("(.+?)"\)', python)) <= made


def test_python_takes_five_lines():
    ((_, python),) = blocks("python")
    assert len([line for line in python.splitlines() if line]) <= 5


def test_every_figure_of_the_readmes_table_stands_in_the_page_that_its_row_names():
    section = TEXT.partition("\n## Measured")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
    named = ""
    for _, *figures, source in rows[2:]:  # below the heading and its rule
        link = re.search(r"\]\((docs/[^)#]+)", source)
        named = link[1] if link else named  # "the same"
        page = (ROOT / named).read_text()
        numbers = re.findall(r"\d+\.\d+", " ".join(figures))
        assert numbers and [number for number in numbers if number not in page] == [], figures


def masked(line: str) -> str:
    """A line without its digits: times and figures differ by machine."""
    return re.sub(r"\d+([.,:]\d+)*", "#", line.rstrip())


def assert_prints(output: str, shown: str) -> None:
    """Asserts that the lines of a block of the README are in an output in their order, digits masked."""
    lines = iter([masked(line) for line in output.splitlines()])
    for line in shown.splitlines():
        wanted = masked(line)
        assert any(printed == wanted for printed in lines), f"not printed, or not there: {line}"


def find_python(minor: int) -> str:
    """An interpreter of Python 3.`minor`; skips where there is none."""
    folders = [pathlib.Path(folder) for folder in os.environ["PATH"].split(os.pathsep)]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    folders += sorted(pyenv.glob(f"versions/3.{minor}.*/bin"))
    for folder in folders:
        command = [str(folder / f"python3.{minor}"), "-c", "import sys; print(sys.base_prefix)"]
        if not os.access(command[0], os.X_OK):
            continue
        answer = subprocess.run(command, capture_output=True, text=True)
        if answer.returncode == 0:
            return f"{answer.stdout.strip()}/bin/python3.{minor}"
    pytest.skip(f"no python3.{minor} on this machine")


def newcomers_clone(folder: pathlib.Path) -> pathlib.Path:
    """A copy of this clone, in which somebody has put photos: digits, as images of three classes."""
    clone = folder / "vit_jax"
    shutil.copytree(ROOT, clone, ignore=shutil.ignore_patterns(*NOT_CLONED), symlinks=True)
    digits = load_digits()
    for number in np.flatnonzero(digits.target < 3)[:90]:
        path = clone / "photos" / "abc"[digits.target[number]] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        image = (digits.images[number] * 15).astype(np.uint8)
        cv2.imwrite(str(path), cv2.resize(image, (64, 64), interpolation=cv2.INTER_CUBIC))
    return clone


def session_of_shell() -> str:
    """A script of all blocks of the README, which shows each command, runs it, and ends at the first that fails."""
    lines = []
    for language, text in blocks("bash", "python"):
        if language == "python":
            text = f"python - <<'PYTHON'\n{text}PYTHON\n"
            commands = [text]
        else:
            commands = re.findall(r"(?:.*\\\n)*.+\n", text)
        for command in commands:
            lines += [f"cat <<'SHOWN'\n$ {command}SHOWN\n", command]
            lines.append('code=$?; [ $code = 0 ] || { echo "ended with $code"; exit $code; }\n')
    return "".join(lines)


@pytest.mark.slow
@pytest.mark.parametrize("minor", [11, 13])
def test_every_command_of_the_readme_runs_in_its_order_in_a_fresh_environment(minor, tmp_path):
    """The transcript stays in pytest's folder."""
    interpreter, clone = find_python(minor), newcomers_clone(tmp_path)
    programs, home = tmp_path / "bin", tmp_path / "home"
    programs.mkdir()
    home.mkdir()
    (programs / "python3").write_text(f'#!/bin/sh\nexec {interpreter} "$@"\n')
    (programs / "python3").chmod(0o755)
    # The variables of a terminal after a login, and those that lead to package indexes and the hub.
    kept = {
        name: value for name, value in os.environ.items() if re.match("PIP_|SSL_|HF_|https?_", name)
    }
    path = f"{programs}:/usr/local/bin:/usr/bin:/bin"
    environment = kept | {"PATH": path, "HOME": str(home), "LANG": "C.UTF-8"}
    script, transcript = tmp_path / "session.sh", tmp_path / "transcript.txt"
    script.write_text(session_of_shell())
    with transcript.open("wb") as output:
        done = subprocess.run(
            ["bash", script], cwd=clone, env=environment,
            stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip
    text = transcript.read_text()
    print(f"{transcript}\n{text}")
    assert done.returncode == 0, f"{transcript}:\n{text[-5000:]}"
    for _, shown in blocks("text"):
        assert_prints(text, shown)
    assert "\nPYTHON\n0\n" in text  # as the README says below the block
