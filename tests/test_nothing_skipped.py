"""What the tests may skip: nothing for want of a package that their own environment has, and in the gate
nothing at all.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
SETUP = (ROOT / "setup.py").read_text()
# `tests/run.sh` installs these without what they depend on, which is why setup.py does not name them.
BESIDE = {"timm", "lightly", "lightly_utils"}
# The names under which packages of setup.py are imported, where those differ.
MODULES = {
    "gcp-storage-emulator": "gcp_storage_emulator",
    "kubernetes-validate": "kubernetes_validate",
    "pyyaml": "yaml",
    "jax": "libtpu",  # of the extra `tpu`
    "tensorflow-datasets": "tensorflow_datasets",
}
# A package of the environment is imported plainly, except where it is there for some versions of Python only.
ONLY_SOME = {"torch", "torchmetrics", "transformers", "netcal"}
ASKED = re.compile(r"""(?:importorskip|find_spec|lazily\.Package)\(\s*f?["']([\w.]+)["']""")


def packages() -> dict[str, str]:
    """The modules of the requirements in setup.py that the tests' environment has, by their condition."""
    start = SETUP.index("TEST = [")
    listed = SETUP[start : SETUP.index("]\n", SETUP.index("wandb", start))]
    listed += SETUP[SETUP.index("install_requires=[") : SETUP.index("extras_require=")]
    for name in re.findall(r"\*(\w+),", listed):
        listed += re.search(rf"^{name} = \[(.*)\]", SETUP, re.M)[1]
    found = {}
    for requirement in re.findall(r'"([^"]+)"', listed):
        name = re.match(r"[\w.-]+", requirement)[0]
        for module in MODULES.get(name, name.replace("-", "_")).split(", "):
            found[module] = requirement.partition(";")[2].strip()
    return found


def asked_for() -> list[tuple[str, str]]:
    """(where, module) of every test that is skipped if a module is absent."""
    found = []
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if path.name == pathlib.Path(__file__).name:
            continue
        for number, line in enumerate(path.read_text().splitlines(), 1):
            for name in ASKED.findall(line):
                found.append((f"{path.relative_to(ROOT)}:{number}", name.split(".")[0]))
    return found


def test_no_test_is_skipped_for_a_package_that_the_test_environment_lacks():
    there = packages().keys() | BESIDE
    assert [(where, name) for where, name in asked_for() if name not in there] == []
    run = (ROOT / "tests" / "run.sh").read_text()
    assert all(name.replace("_", "-") in run for name in BESIDE)


def test_what_every_python_of_the_test_environment_has_is_imported_plainly():
    conditional = {name for name, condition in packages().items() if condition} | ONLY_SOME
    optional = conditional | BESIDE
    assert [(where, name) for where, name in asked_for() if name not in optional] == []


def test_what_takes_seconds_to_import_is_imported_by_the_tests_that_use_it():
    slow = re.compile(
        r"^(import|from) (torch|transformers|torchmetrics|timm)\b|^\w+ = pytest.importorskip", re.M
    )
    files = (ROOT / "tests").rglob("test_*.py")
    assert [path.name for path in files if slow.search(path.read_text())] == []


SKIPS = """
import pytest

@pytest.mark.skipif(True, reason="no SLURM here")
def test_skipped(): pass

def test_skips(): pytest.importorskip("no_such_module")

@pytest.mark.xfail
def test_is_expected_to_fail(): assert False

def test_passes(): pass
"""


def test_in_the_gate_a_skipped_test_fails_and_says_why(tmp_path):
    (tmp_path / "test_some.py").write_text(SKIPS)
    (tmp_path / "test_all.py").write_text("import pytest\npytest.importorskip('no_other_module')")
    pytest_here = [sys.executable, "-m", "pytest", "-p", "tests.skips", "-p", "no:cacheprovider"]
    allowed = subprocess.run([*pytest_here, tmp_path], cwd=ROOT, capture_output=True, text=True)
    assert allowed.returncode == 0 and "1 passed, 3 skipped, 1 xfailed" in allowed.stdout
    gate = subprocess.run(
        [*pytest_here, "--nothing_skipped", "--continue-on-collection-errors", tmp_path],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert gate.returncode == 1 and "1 failed, 1 passed, 1 xfailed, 2 errors" in gate.stdout
    for reason in ("no SLURM here", "no_such_module", "no_other_module"):
        assert "with --nothing_skipped: " in gate.stdout and reason in gate.stdout


@pytest.fixture
def gate(tmp_path):
    """`gate(installed, apt_get)`: runs .ci/run where these packages are installed, with a stand-in for apt-get
    and for the tests: the process, and the calls of apt-get.
    """
    programs, root = tmp_path / "bin", tmp_path / "project"
    (root / ".ci").mkdir(parents=True)
    (root / "tests").mkdir()
    programs.mkdir()
    shutil.copy(ROOT / ".ci/run", root / ".ci/run")
    (root / "tests/run.sh").write_text('echo "tests $*"')

    def run(installed: str, apt_get: str) -> tuple[subprocess.CompletedProcess, list[str]]:
        calls = tmp_path / "calls"
        bodies = {
            "dpkg-query": f'case " {installed} " in *" ${{!#}} "*) printf installed ;; *) exit 1 ;; esac',
            "apt-get": f'echo "$*" >> {calls}; {apt_get}',
            "id": "echo 0",
        }
        for name, body in bodies.items():
            (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
            (programs / name).chmod(0o755)
        environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
        result = subprocess.run(
            ["bash", root / ".ci/run"], env=environment, capture_output=True, text=True
        )
        return result, calls.read_text().splitlines() if calls.exists() else []

    return run


def test_the_gate_installs_the_programs_that_tests_start_and_then_runs_them_all(gate):
    done, calls = gate("munge zsh fish", apt_get="echo Reading lists")
    assert (done.returncode, done.stdout, done.stderr) == (0, "tests --nothing_skipped\n", "")
    update, install = calls
    assert update.endswith("update") and install.endswith("slurm-wlm") and "--yes" in install


def test_the_gate_installs_nothing_that_is_there(gate):
    done, calls = gate("slurm-wlm munge zsh fish", apt_get="exit 1")
    assert (done.stdout, calls) == ("tests --nothing_skipped\n", [])


def test_the_gate_says_what_it_could_not_install(gate):
    done, _ = gate("", apt_get="echo no route to host; exit 100")
    assert done.returncode == 1 and not done.stdout
    assert (
        "no route to host" in done.stderr and "apt-get install slurm-wlm munge zsh" in done.stderr
    )
