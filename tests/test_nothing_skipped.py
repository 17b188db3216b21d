"""What the tests may skip: nothing for want of a package that their own environment has."""

import pathlib
import re

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
    "transformers": "transformers, safetensors, tokenizers",
}
# A package of the environment is imported plainly, except where it is there for some versions of Python only.
ONLY_SOME = {"torch", "torchmetrics", "transformers", "netcal", "safetensors"}
ASKED = re.compile(r"""(?:importorskip|find_spec)\(\s*f?["']([\w.]+)["']""")
# What is tested is that it is absent, or that it changes nothing.
ABSENT = {"tensorflow"}


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
    there = packages().keys() | BESIDE | ABSENT
    assert [(where, name) for where, name in asked_for() if name not in there] == []
    run = (ROOT / "tests" / "run.sh").read_text()
    assert all(name.replace("_", "-") in run for name in BESIDE)


def test_what_every_python_of_the_test_environment_has_is_imported_plainly():
    conditional = {name for name, condition in packages().items() if condition} | ONLY_SOME
    optional = conditional | BESIDE | ABSENT
    assert [(where, name) for where, name in asked_for() if name not in optional] == []
