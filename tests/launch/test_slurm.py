"""launch/slurm/train.sbatch on a real SLURM cluster: two nodes on this machine, one process each."""

import json
import pathlib
import shlex
import sys

import pytest

from tests.conftest import QUICK
from tests.integration.conftest import TINY
from tests.launch import slurm
from tests.waiting import until

ROOT = pathlib.Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "launch/slurm/train.sbatch"

pytestmark = pytest.mark.skipif(not slurm.installed(), reason="SLURM and munge are not installed")

# In the place of vit_jax: saves when told to, runs to its end when it was started for the second time.
PROGRAM = """
import os, pathlib, signal, sys, time
workdir = pathlib.Path(sys.argv[2].partition("=")[2])
restarts, process = int(os.environ.get("SLURM_RESTART_COUNT", 0)), int(os.environ["SLURM_PROCID"])
def leave(*_):
    (workdir / "checkpoints" / str(restarts)).mkdir(parents=True, exist_ok=True)
    sys.exit(42)
signal.signal(signal.SIGTERM, leave)
print("start", restarts, flush=True)
(workdir / f"ready-{process}-{restarts}").touch()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm.cluster(tmp_path_factory.mktemp("slurm"), gpus=8) as cluster:
        yield cluster


@pytest.fixture
def submit(cluster, tmp_path):
    """`submit(program, *flags)`: a job of the script, whose processes run `program`, one a node if no flags are given;
    cancelled at the end.
    """
    jobs = []

    def start(program: str, *flags: str, **environment: str) -> str:
        (tmp_path / "vit_jax.py").write_text(PROGRAM + program)
        jobs.append(
            cluster.command(
                "sbatch", "--parsable", "--nodes=2", *(flags or ["--ntasks-per-node=1"]), SCRIPT,
                "train", f"--workdir={tmp_path}",
                cwd=tmp_path, env={"PYTHON": sys.executable} | environment,
            )
        )  # fmt: skip
        return jobs[-1]

    yield start
    cluster.command("scancel", *jobs)
    for job in jobs:
        cluster.wait_for(job, "COMPLETED", "FAILED", "CANCELLED")


def ready(tmp_path, restarts: int) -> None:
    """Returns when both processes of a start are up."""
    until(lambda: len(list(tmp_path.glob(f"ready-?-{restarts}"))) == 2)


def test_a_job_that_is_told_to_save_is_queued_again_and_goes_on(cluster, submit, tmp_path):
    job = submit("time.sleep(0 if restarts else 10_000)")
    ready(tmp_path, 0)
    cluster.command("scancel", "--signal=TERM", job)  # As SLURM itself does before the time limit.
    cluster.start_again(job)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
    assert (tmp_path / "checkpoints/0").exists()


def test_a_job_whose_place_a_more_urgent_one_takes_saves_and_comes_back(cluster, submit, tmp_path):
    job = submit("time.sleep(0 if restarts else 10_000)")
    ready(tmp_path, 0)
    urgent = cluster.command("sbatch", "--parsable", "--partition=urgent", "--nodes=2",
                             "--wrap=sleep 0.1", cwd=tmp_path)  # fmt: skip
    cluster.wait_for(urgent, "COMPLETED")
    assert (tmp_path / "checkpoints/0").exists()
    cluster.start_again(job)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"


def test_a_job_one_of_whose_processes_is_killed_is_queued_again(cluster, submit, tmp_path):
    job = submit(
        "os.kill(os.getpid(), 9) if process and not restarts else sys.exit(42 * (not restarts))"
    )
    cluster.start_again(job)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"


@pytest.mark.parametrize("code", [1, 2])
def test_a_job_that_ends_with_an_error_is_not_queued_again(cluster, submit, code):
    job = submit(f"sys.exit({code})")
    cluster.wait_for(job, "FAILED")
    assert (cluster.exit_code(job), cluster.restarts(job)) == (code, 0)


def test_a_job_without_a_newer_checkpoint_gives_up(cluster, submit):
    job = submit("sys.exit(42)", MAX_RESTARTS="1")
    cluster.start_again(job)
    cluster.wait_for(job, "FAILED")
    assert (cluster.exit_code(job), cluster.restarts(job)) == (1, 1)


def test_a_cancelled_job_saves_and_is_not_queued_again(cluster, submit, tmp_path):
    job = submit("time.sleep(10_000)")
    ready(tmp_path, 0)
    cluster.command("scancel", job)
    cluster.wait_for(job, "CANCELLED")
    until((tmp_path / "checkpoints/0").exists)
    assert cluster.restarts(job) == 0


CORES = """
(workdir / f"cores-{process}").write_text(" ".join(map(str, os.sched_getaffinity(0))))
"""


def cores_of_tasks(folder: pathlib.Path) -> list[set[int]]:
    return [set(map(int, file.read_text().split())) for file in sorted(folder.glob("cores-*"))]


def test_one_process_a_node_may_use_all_its_cores_and_memory_on_a_site_that_gives_little(
    cluster, submit, tmp_path
):
    job = submit(CORES)
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
    assert cores_of_tasks(tmp_path) == [set(range(slurm.CPUS))] * 2
    resources = cluster.resources(job)
    assert (resources["cpu"], resources["node"]) == (str(2 * slurm.CPUS), "2")
    assert resources["mem"] in (f"{2 * slurm.NODE_MIB}M", f"{2 * slurm.NODE_MIB / 1024:.3f}G")


def test_several_processes_of_a_node_have_an_equal_share_of_its_cores(cluster, submit, tmp_path):
    job = submit(CORES, "--gpus-per-node=2")  # one for each
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
    cores = cores_of_tasks(tmp_path)  # of two tasks on each node
    assert [len(of_task) for of_task in cores] == [slurm.CPUS // 2] * 4
    assert not cores[0] & cores[1] and not cores[2] & cores[3]


def test_a_job_that_shares_nodes_has_what_it_asked_for(cluster, submit, tmp_path):
    job = submit(CORES, "--oversubscribe", "--cpus-per-task=1", "--mem=500M")
    assert cluster.wait_for(job, "COMPLETED", "FAILED") == "COMPLETED"
    resources = cluster.resources(job)
    assert (resources["cpu"], resources["mem"]) == ("2", "1000M")
    assert len(cores_of_tasks(tmp_path)) == 2


USED = """
import json, os
from vit_jax.devices import engines, gpus
gpus.on_node = lambda: 0  # this machine's own
print(json.dumps([int(os.environ["SLURM_NODEID"]), engines.find_place().local_device_ids]))
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--ntasks-per-node=1", "--gpus-per-node=8"], [None]),
        (["--ntasks-per-node=2", "--gpus-per-node=8"], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        (["--ntasks-per-node=2", "--gpus-per-node=2"], [[0], [1]]),
        (["--ntasks-per-node=2", "--gpus-per-task=4"], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value[0], str) else "",
)
def test_processes_of_two_nodes_with_gpus_use_all_of_them(cluster, flags, expected):
    printed = cluster.command(
        "srun", "--nodes=2", *flags, sys.executable, "-c", USED,
        env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": ""},
    )  # fmt: skip
    found = sorted((json.loads(line) for line in printed.splitlines()), key=str)
    assert found == [[node, ids] for node in range(2) for ids in expected]


def test_digits_are_trained_on_two_nodes_stopped_and_trained_on(
    cluster, tmp_path, compilation_cache
):
    workdir = tmp_path / "run"
    overrides = [f"--config.{name}={value}" for name, value in TINY.items()]
    job = cluster.command(
        "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", SCRIPT, "train", f"--workdir={workdir}",
        f"--config={ROOT}/configs/digits.py", *overrides, "--config.duration=150 steps",
        "--config.log.every=10 steps", "--config.checkpoint.every=75 steps",
        "--config.model.depth=1", "--config.eval.evaluators=()", f"--config.compilation_cache={compilation_cache}",
        cwd=tmp_path,
        env={"PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu",
             "XLA_FLAGS": f"--xla_force_host_platform_device_count=2 {QUICK}"},
    )  # fmt: skip
    metrics = workdir / "metrics.jsonl"
    until(lambda: metrics.exists() and len(metrics.read_text().splitlines()) > 2)
    cluster.command("scancel", "--signal=TERM", job)
    cluster.start_again(job)
    state = cluster.wait_for(job, "COMPLETED", "FAILED")
    log = (tmp_path / f"vit_jax-{job}.log").read_text()
    assert state == "COMPLETED", log
    assert "devices: 2 local of 4 x cpu" in log and "resumed at step" in log
    assert json.loads((workdir / "result.json").read_text())["step"] == 150


@pytest.fixture
def run_script(cluster, tmp_path, compilation_cache):
    """`run_script(text)`: what a job on two nodes prints, whose script has the function `run NAME FLAGS…`: a training
    run with a process on each node, which writes NAME.log. PROCESS in a flag becomes the process's number.
    """
    overrides = [f"--config.{name}={value}" for name, value in TINY.items()]
    command = shlex.join([
        sys.executable, "-P", "-m", "vit_jax", "train", f"--config={ROOT}/configs/digits.py", *overrides,
        "--config.eval.evaluators=()", f"--config.compilation_cache={compilation_cache}",
    ])  # fmt: skip
    (tmp_path / "process.sh").write_text(f'exec {command} "${{@//PROCESS/$SLURM_PROCID}}"\n')

    def run(text: str) -> str:
        (tmp_path / "job.sh").write_text(f"""#!/bin/bash
            run() {{
                local name=$1; shift
                srun --overlap --mem=3000M --ntasks-per-node=1 bash process.sh --workdir=$PWD/$name "$@" &> $name.log
                echo $name ended with $?
            }}
            {text}
        """)
        job = cluster.command(
            "sbatch", "--parsable", "--nodes=2", "--ntasks-per-node=1", "--exclusive", "--mem=0", "--output=job.log",
            "job.sh", cwd=tmp_path,
            env={"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": QUICK},
        )  # fmt: skip
        cluster.wait_for(job, "COMPLETED", "FAILED")
        return (tmp_path / "job.log").read_text()

    return run


@pytest.mark.slow
def test_a_second_step_of_a_job_is_refused_and_the_run_of_the_first_continues(run_script, tmp_path):
    told = run_script("""
        run first '--config.duration=100_000 steps' &
        until grep -qs "step 4 " first.log; do sleep 1; done
        run second '--config.duration=4 steps'
        tail -n 1 first/metrics.jsonl > then
        while tail -n 1 first/metrics.jsonl | cmp -s - then; do sleep 1; done
        scancel --signal=TERM $SLURM_JOB_ID.0
        wait
    """)
    assert told.splitlines() == ["second ended with 2", "first ended with 42"]
    second = (tmp_path / "second.log").read_text()
    assert "cannot listen on the port" in second and "that is vit_jax train on" in second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flag", "field"),
    [("optim.lr=0.00PROCESS1", "optim.lr"), ("checkpoint.every=1PROCESS steps", "checkpoint.every")],
)  # fmt: skip
def test_nodes_of_a_job_that_differ_all_end_with_2(run_script, tmp_path, flag, field):
    assert run_script(f"run first '--config.{flag}'") == "first ended with 2\n"
    log = (tmp_path / "first.log").read_text()
    assert f"do not agree on config.{field}: process 1" in log
    assert not (tmp_path / "first/checkpoints").exists()


def test_a_run_that_is_launched_takes_the_nodes_and_gpus_that_it_names(
    launch, cluster, tmp_path, monkeypatch
):
    (tmp_path / "vit_jax.py").write_text(
        PROGRAM + "print('gpus', os.environ['SLURM_GPUS_ON_NODE'])"
    )
    monkeypatch.chdir(tmp_path)
    for name, value in (cluster.environment | {"PYTHON": sys.executable}).items():
        monkeypatch.setenv(name, value)
    words = ("train", f"--workdir={tmp_path}", "--config=digits")
    code, out, err = launch("slurm", "--nodes=2", "--gpus_per_node=2", "--", *words, "--", "--wait")
    assert code == 0 and "hours on 4 GPUs" in out, err
    (log,) = tmp_path.glob("vit_jax-*.log")
    assert log.read_text().count("gpus 2") == 4, "one process for each GPU"
