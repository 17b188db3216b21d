"""What a repository has beside its code: the workflow, hooks, owners, the pull-request form, the editor's settings."""

import configparser
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
STEP = {"name", "uses", "with", "run", "env", "if", "id"}
SUFFIXES = (
    ".py",
    ".md",
    ".json",
    ".sh",
    ".yml",
    ".yaml",
    ".toml",
    ".ipynb",
    ".css",
    ".html",
    ".tsv",
    ".txt",
)
FOLDERS = (".ci", ".github", "configs", "docs", "launch", "tests", "tools", "vit_jax")


# Those that take hours, once a week.
SLOW = {"slow.yml": ({"schedule", "workflow_dispatch"}, 350)}


def jobs(name: str = "tests.yml") -> dict[str, dict]:
    (workflow,) = (path for path in WORKFLOWS if path.name == name)
    return yaml.safe_load(workflow.read_text())["jobs"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_a_workflow_has_the_form_that_github_reads(path):
    workflow = yaml.safe_load(path.read_text())
    # YAML 1.1 reads the key `on` as true.
    assert workflow.keys() == {"name", True, "permissions", "concurrency", "jobs"}
    events, minutes = SLOW.get(path.name, ({"push", "pull_request"}, 60))
    assert workflow[True].keys() == events
    assert workflow["permissions"] == {"contents": "read"}
    for job in workflow["jobs"].values():
        assert job.keys() <= {"runs-on", "timeout-minutes", "strategy", "env", "steps"}
        assert re.fullmatch(r"ubuntu-\d\d\.\d\d", job["runs-on"])
        assert job["timeout-minutes"] <= minutes
        for step in job["steps"]:
            assert step.keys() <= STEP and len({"uses", "run"} & step.keys()) == 1
            assert "uses" not in step or re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
    known = {
        "matrix.python",
        "matrix.part",
        "github.workflow",
        "github.ref",
        "github.event_name == 'pull_request'",
    }
    assert {*re.findall(r"\$\{\{ (.*?) \}\}", path.read_text())} <= known


def test_the_workflow_runs_the_gate_on_the_oldest_python_and_tests_on_all_others():
    oldest, *others = re.findall(r"minor in \((.*)\)\]", (ROOT / "setup.py").read_text())[0].split(
        ", "
    )
    gate, later = jobs()["gate"], jobs()["later"]
    assert gate["env"] == {"PYTHON": f"python3.{oldest}"}
    assert [step["run"] for step in gate["steps"] if "run" in step] == ["bash .ci/run"]
    assert later["strategy"]["matrix"] == {"python": [f"3.{minor}" for minor in others]}
    assert later["env"] == {"PYTHON": "python${{ matrix.python }}"}
    (words,) = (step["run"].split() for step in later["steps"] if "run" in step)
    assert words[:2] == ["bash", "tests/run.sh"] and len(words) > 2
    assert all((ROOT / path).exists() for path in words[1:])
    for job in (gate, later):
        (python,) = (
            s["with"] for s in job["steps"] if s.get("uses", "").startswith("actions/setup-python")
        )
        assert python["python-version"] in (f"3.{oldest}", "${{ matrix.python }}")
        assert all((ROOT / path).exists() for path in python["cache-dependency-path"].split())


def test_every_folder_of_slow_tests_is_run_once_a_week():
    (job,) = jobs("slow.yml").values()
    parts = job["strategy"]["matrix"]["part"]
    alone = [folder for part in parts[:-1] for folder in part.split()]
    assert parts[-1].split() == ["tests", *(f"--ignore={folder}" for folder in alone)]
    assert all((ROOT / folder).is_dir() for folder in alone)
    assert [s["run"] for s in job["steps"] if "run" in s] == [
        "bash tests/run.sh -m slow ${{ matrix.part }}"
    ]


def test_a_hook_refuses_what_the_gate_refuses(tmp_path):
    """Each is run as pre-commit runs it, on a file that has its fault and on one that has none."""
    bad, good = tmp_path / "bad.py", tmp_path / "good.py"
    (repository,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    assert repository["repo"] == "local"  # which needs no network
    assert [hook["id"] for hook in repository["hooks"]] == ["ruff-check", "ruff-format"]
    for hook in repository["hooks"]:
        assert hook["language"] == "system" and "python" in hook["types_or"]
        program, *words = hook["entry"].split()
        assert program == ".venv/bin/ruff"
        command = [pathlib.Path(sys.executable).with_name("ruff"), *words]
        bad.write_text("import os\nx  = 1\n")
        good.write_text("x = 1\n")
        for path, fine in ((bad, False), (good, True)):
            before = path.read_text()
            done = subprocess.run([*command, path], cwd=ROOT, capture_output=True, text=True)
            # pre-commit fails if the hook fails or changes the file.
            assert (done.returncode == 0 and path.read_text() == before) == fine, done.stdout
    gate = (ROOT / "tests" / "run.sh").read_text()
    assert "ruff check ." in gate and "ruff format --check ." in gate


def test_the_owners_are_those_of_the_core_and_of_the_gate():
    lines = (ROOT / ".github" / "CODEOWNERS").read_text().splitlines()
    rules = [line.split() for line in lines if not line.startswith("#")]
    owned = set()
    for pattern, *owners in rules:
        files = set(ROOT.glob(f"{pattern[1:]}**/*" if pattern.endswith("/") else pattern[1:]))
        assert pattern.startswith("/") and files, pattern
        assert owners and all(re.fullmatch(r"@[\w-]+(/[\w-]+)?", owner) for owner in owners)
        owned |= files
    core = (ROOT / "tests" / "core_files.txt").read_text().split()
    assert [file for file in core if ROOT / file not in owned] == []


def test_the_pull_request_form_asks_for_what_contributing_does():
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## What a change must show")[2]
    kinds = re.findall(r"^- \*\*([^*]+)\*\*", section.partition("\n## ")[0], re.M)
    form = (ROOT / ".github" / "pull_request_template.md").read_text()
    assert len(kinds) == 4 and re.findall(r"^- \[ \] \*\*([^*]+)\*\*", form, re.M) == kinds
    for path in re.findall(r"`([\w/.]+\.(?:md|sh))`", form):
        assert (ROOT / path).exists(), path


def test_files_are_as_the_editors_are_asked_to_write_them():
    config = configparser.ConfigParser()
    config.read_string(f"[top]\n{(ROOT / '.editorconfig').read_text()}")
    every = config["*"]
    assert (every["charset"], every["end_of_line"]) == ("utf-8", "lf")
    assert every["insert_final_newline"] == every["trim_trailing_whitespace"] == "true"
    paths = [path for path in ROOT.iterdir() if path.is_file()]
    paths += [path for folder in FOLDERS for path in (ROOT / folder).rglob("*")]
    checked = [path for path in paths if path.suffix in SUFFIXES]
    assert len(checked) > 900
    for path in checked:
        text = path.read_bytes().decode("utf-8")
        assert "\r" not in text and (not text or text.endswith("\n")), path
        assert not re.search(r"[ \t]$", text, re.M), path
