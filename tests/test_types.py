"""The package's types, by pyrefly: what they promise to callers holds, and finds mistakes of callers."""

import ast
import importlib.util
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Checked by the stricter preset: what users import.
PUBLIC = (
    "__init__.py", "annotations.pyi", "api.py", "extend.py", "recipes/shipped.py", "planning/catalogue.py",
    "models/layer_features.py", "interchange/pushing.py", "interchange/model_card.py", "training/upkeep/callbacks.py",
    "commands/recipe_command.py",
)  # fmt: skip


def check(*arguments: str) -> subprocess.CompletedProcess:
    beside = pathlib.Path(sys.executable).with_name("pyrefly")
    program = str(beside) if beside.exists() else shutil.which("pyrefly")
    command = [
        program,
        "check",
        "--python-interpreter-path",
        sys.executable,
        "--output-format=min-text",
    ]
    return subprocess.run([*command, *arguments], cwd=ROOT, capture_output=True, text=True)


def test_the_package_has_no_errors_of_types():
    done = check()
    assert done.returncode == 0, done.stdout


def test_the_public_modules_have_none_that_the_stricter_preset_finds():
    files = [str(ROOT / "vit_jax" / name) for name in PUBLIC]
    done = check("--preset=default", "--search-path=.", *files)
    assert done.returncode == 0, done.stdout


def test_of_ten_mistakes_all_are_found_and_in_correct_uses_none():
    mistakes = ROOT / "tests" / "typing" / "mistakes.py"
    lines = mistakes.read_text().splitlines()
    marked = {n for n, line in enumerate(lines, 1) if line.endswith("# mistake")}
    correct = mistakes.with_name("correct.py")
    done = check("--preset=default", "--search-path=.", str(mistakes), str(correct))
    found = re.findall(r"^ERROR \S*?(\w+\.py):(\d+)", done.stdout, re.M)
    assert {(name, int(number)) for name, number in found} == {("mistakes.py", n) for n in marked}
    assert len(marked) == 10, done.stdout


def test_what_checkers_and_shells_know_of_options_is_of_the_schema():
    path = ROOT / "tools" / "generated.py"
    spec = importlib.util.spec_from_file_location("generated", path)
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    for path, text in tool.files().items():
        assert path.read_text() == text, f"{path}: python tools/generated.py writes it"


def test_what_type_checkers_know_by_name_can_be_imported():
    from vit_jax import annotations

    known = set()
    for node in ast.parse((ROOT / "vit_jax" / "annotations.pyi").read_text()).body:
        if isinstance(node, ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.Assign):
            known.add(node.targets[0].id)
    public = {name for name in known if not name.startswith("_")}
    assert public == {name for name in vars(annotations) if name[0].isupper()} - {"ConfigDict"}
