"""launch/skypilot/train.yaml: its fields, and what its commands do with SkyPilot's variables."""

import json
import os
import pathlib
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
# In the place of vit_jax.
PROGRAM = """
import json, os, sys
names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
print(json.dumps([[os.environ[n] for n in names], sys.argv[1:]]), flush=True)
sys.exit(int(os.environ.get("CODE", 0)))
"""


@pytest.fixture(scope="module")
def task() -> dict:
    return yaml.safe_load(FILE.read_text())


def run_block(task: dict, folder: pathlib.Path, rank: int, **variables) -> tuple[int, str]:
    """Exit code and output of the task's `run` on a node, in a folder like the copied checkout."""
    (folder / "vit_jax.py").write_text(PROGRAM)
    for name, target in (("launch", ROOT / "launch"), (".venv", pathlib.Path(sys.prefix))):
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
        command = [shellcheck, "--shell=bash", "--severity=warning", "--exclude=SC1091,SC2155", "-"]
        result = subprocess.run(command, input=task[name], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_each_node_runs_one_process_that_knows_its_place(task, tmp_path, rank):
    code, output = run_block(
        task, tmp_path, rank, CONFIG="configs/digits.py:a b", WORKDIR=f"{tmp_path}/run",
        FLAGS="--config.seed=1 --config.batch_size=64", EXTRA="cuda13",
    )  # fmt: skip
    assert code == 0, output
    (line,) = [line for line in output.splitlines() if line.startswith("[0] [[")]
    place, words = json.loads(line.removeprefix("[0] "))
    assert place == ["10.0.0.1:8476", "2", str(rank)]
    config = ["--config=configs/digits.py:a b", f"--workdir={tmp_path}/run"]
    assert words == ["train", *config, "--config.seed=1", "--config.batch_size=64"]


@pytest.mark.parametrize("code", [1, 2])
def test_an_error_that_a_restart_will_not_cure_is_the_job_s(task, tmp_path, code):
    variables = {"CONFIG": "c", "WORKDIR": str(tmp_path / "run"), "FLAGS": "", "CODE": str(code)}
    assert run_block(task, tmp_path, 0, **variables)[0] == code
