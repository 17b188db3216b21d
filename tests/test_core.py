"""The core: the files that every run of a ViT uses, `core_files.txt`. All others are imported when a config names
them. Packages whose `__init__.py` has a docstring alone are not listed.
"""

import ast
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
CORE = (ROOT / "tests" / "core_files.txt").read_text().split()

# What a run does before it uses devices, and the program of its step.
PUT_TOGETHER = """
from types import SimpleNamespace

import jax
import vit_jax.training.loop
from vit_jax import evaluation
from vit_jax.data import sources
from vit_jax.recipes.user_files import load_config
from vit_jax.training.actions import ACTIONS, is_needed
from vit_jax.training.assembly import assemble, make_mesh, resolve
from vit_jax.training.preflight import check_run
from vit_jax.training.upkeep.callbacks import Callbacks
from vit_jax.training.with_data import assembly_for, subject_of


def trace(assembly):
    mesh = make_mesh(assembly.config)
    with jax.set_mesh(mesh):
        state, (batch,) = assembly.abstract_state(mesh), assembly.abstract_batches(mesh)
        jax.eval_shape(assembly.train_step, state, batch)


config = resolve(load_config("digits"))
source = sources.open_train(config.data)
assembly = assembly_for(config, source)
suite = evaluation.make(config.eval.evaluators, subject_of(assembly, source))
check_run(assembly, source, suite)
trace(assembly)
run = SimpleNamespace(config=config, assembly=assembly, tier=None, callbacks=Callbacks([]))
actions = [ACTIONS[name] for name in ACTIONS if is_needed(name, run)]
config = resolve(load_config("vit_i21k:B/16,light2"))
trace(assemble(config, num_classes=21_843, examples_per_epoch=12_743_321))
"""
TRAINED = """
import sys
from vit_jax.commands.main import run

sys.argv[1:] = [
    "train", "--config=digits", "--workdir=" + sys.argv[1], "--config.duration=2 steps", "--config.batch_size=16",
    "--config.model.depth=1",
]
run()
"""
LOADED = """
import pathlib, sys
root = pathlib.Path(sys.modules["vit_jax"].__file__).parents[1]
files = {getattr(m, "__file__", None) for n, m in sys.modules.items() if n.split(".")[0] == "vit_jax"}
print("LOADED", *sorted(pathlib.Path(file).relative_to(root).as_posix() for file in files if file))
"""


def files_of(code: str, *arguments: object) -> set[str]:
    """The files of the package that a fresh process has imported when it has run `code`."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}\n{LOADED}"
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    loaded = done.stdout.rpartition("LOADED ")[2].split()
    return {file for file in loaded if len(ast.parse((ROOT / file).read_text()).body) > 1}


def test_a_run_of_a_vit_imports_the_core_and_nothing_else():
    loaded, core = files_of(PUT_TOGETHER), set(CORE)
    assert loaded - core == set(), "not in tests/core_files.txt: import it where it is used"
    assert core - loaded == set(), "in tests/core_files.txt, and no run of a ViT uses it"


@pytest.mark.slow
def test_the_command_that_trains_imports_the_core_and_commands(tmp_path):
    beyond = files_of(TRAINED, tmp_path) - set(CORE)
    slow = {
        "vit_jax/base/native_log.py",
        "vit_jax/base/subprocesses.py",
    }  # after a minute of compiling
    of_commands = {"vit_jax/base/stopping.py"}
    assert {
        file for file in beyond - slow - of_commands if not file.startswith("vit_jax/commands/")
    } == set()
