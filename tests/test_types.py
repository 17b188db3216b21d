"""The package's types, by pyrefly: what they promise to callers holds."""

import pathlib
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Checked by the stricter preset: what users import.
PUBLIC = (
    "__init__.py", "api.py", "extend.py", "recipes/shipped.py", "planning/catalogue.py", "models/layer_features.py",
    "interchange/pushing.py", "interchange/model_card.py", "training/upkeep/callbacks.py", "commands/recipe_command.py",
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


def test_a_wrong_type_is_found(tmp_path):
    (tmp_path / "wrong.py").write_text("import vit_jax\n\nnames: int = vit_jax.list_models('*')\n")
    done = check("--preset=default", "--search-path=.", str(tmp_path / "wrong.py"))
    assert done.returncode == 1 and "list[str]" in done.stdout
