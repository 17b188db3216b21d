"""launch/skypilot/train.yaml: its fields, and what its commands do with SkyPilot's variables."""

import json
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "launch/skypilot/train.yaml"
# docs.skypilot.co, "SkyPilot YAML", and the schemas of skypilot 0.14.1; those that the file may use.
TASK = {
    "name": str,
    "workdir": str,
    "num_nodes": int,
    "resources": dict,
    "envs": dict,
    "setup": str,
    "run": str,
}
RESOURCES = {"accelerators": str, "use_spot": bool, "job_recovery": dict}
RECOVERY = {"strategy": str, "max_restarts_on_errors": int, "recover_on_exit_codes": list}
# In the place of vit_jax, which says where `launch/` is.
PROGRAM = """
import json, os, sys
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
print(json.dumps([[os.environ[n] for n in names], sys.argv[1:]]), flush=True)
sys.exit(int(os.environ.get("CODE", 0)))
"""


@pytest.fixture(scope="module")
def task() -> dict:
    return yaml.safe_load(FILE.read_text())


def run_block(task: dict, folder: pathlib.Path, rank: int, **variables) -> tuple[int, str]:
    """Exit code and output of the task's `run` on a node, in a folder like the copied checkout."""
    (folder / "vit_jax/recipes").mkdir(parents=True, exist_ok=True)
    (folder / "vit_jax/__init__.py").touch()
    (folder / "vit_jax/__main__.py").write_text(PROGRAM)
    shipped = f"def launch_folder():\n    return {str(ROOT / 'launch')!r}\n"
    (folder / "vit_jax/recipes/shipped.py").write_text(shipped)
    for name, target in ((".venv", pathlib.Path(sys.prefix)),):
        if not (folder / name).exists():
            (folder / name).symlink_to(target)
    sky = {
        "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
        "SKYPILOT_NUM_NODES": "2",
        "SKYPILOT_NODE_RANK": str(rank),
    }
    environment = os.environ | sky | {"HOME": str(folder)} | variables
    result = subprocess.run(
        ["bash", "-c", task["run"]], cwd=folder, env=environment, capture_output=True, text=True
    )
    return result.returncode, result.stdout


def test_the_file_has_fields_that_skypilot_knows(task):
    recovery = task["resources"]["job_recovery"]
    for values, known in ((task, TASK), (task["resources"], RESOURCES), (recovery, RECOVERY)):
        assert {name: type(value) for name, value in values.items()} == known
    assert all(value is None or isinstance(value, str) for value in task["envs"].values())
    assert recovery["recover_on_exit_codes"][0] == 42
    assert {0, 1, 2}.isdisjoint(recovery["recover_on_exit_codes"])


def test_both_scripts_of_the_file_are_without_fault(task):
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    for name in ("setup", "run"):
        command = [shellcheck, "--shell=bash", "--severity=warning", "--exclude=SC2155", "-"]
        result = subprocess.run(command, input=task[name], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(("rank", "each"), [(0, 1), (1, 1), (1, 2)])
def test_each_node_runs_processes_that_know_their_place(task, tmp_path, rank, each):
    given = [
        "train",
        "--config=configs/digits.py:a b",
        f"--workdir={tmp_path}/run",
        "--config.seed=1",
    ]
    variables = {"MAX_RESTARTS": "5", "PROCESSES_PER_NODE": str(each)}
    code, output = run_block(task, tmp_path, rank, COMMAND=shlex.join(given), **variables)
    assert code == 0, output
    for local in range(each):
        process = rank * each + local
        (line,) = [line for line in output.splitlines() if line.startswith(f"[{process}] [[")]
        place, words = json.loads(line.removeprefix(f"[{process}] "))
        assert place == ["10.0.0.1:8476", str(2 * each), str(process), str(local), str(each)]
        assert words == given


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_that_a_restart_will_not_cure_is_the_job_s(task, tmp_path, code):
    command = f"train --config=c --workdir={tmp_path}/run"
    variables = {
        "COMMAND": command,
        "MAX_RESTARTS": "5",
        "PROCESSES_PER_NODE": "1",
        "CODE": str(code),
    }
    assert run_block(task, tmp_path, 0, **variables)[0] == code
