"""The scripts that talk to clouds: what they would run, and what they do about what a cloud answers."""

import os
import pathlib
import shlex
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TRAIN = ("train", "--config=configs/vit_i21k.py:B/16,light2", "--workdir=gs://bkt/b16")
WORDS = (*TRAIN, "--config.duration=10 epochs", """--config.data.name=a 'quoted' "name" & more""")


def run(script: str, *arguments: str, **options) -> subprocess.CompletedProcess:
    command = ["bash", str(ROOT / "launch" / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)


def shown(script: str, *arguments: str) -> list[list[str]]:
    """The commands that a dry run prints, each as its words; comments left out."""
    result = run(script, "--dry_run", *arguments) if "sbatch" in script else run(script, *arguments)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    return [shlex.split(line) for line in lines if not line.startswith("#")]


def tpu_vm(action: str, *flags: str) -> list[list[str]]:
    place = ("--name=b16", "--zone=z", "--project=p")
    return shown("tpu_vm.sh", action, *place, "--dry_run", *flags, "--", *WORDS)


def remote(command: list[str]) -> list[str]:
    """The words of the line that `gcloud … ssh` runs over there, from the last && on."""
    line = [word for word in command if word.startswith("--command=")][0].partition("=")[2]
    return shlex.split(line.rpartition("&& ")[2])


def test_the_scripts_have_no_faults_that_shellcheck_knows():
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    scripts = [
        *ROOT.glob("launch/**/*.sh"),
        *ROOT.glob("launch/**/*.sbatch"),
        *ROOT.glob("tools/*.sh"),
    ]
    assert len(scripts) >= 8
    command = [shellcheck, "--external-sources", "--severity=warning", *map(str, scripts)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("type", "version"),
    [
        ("v4-32", "tpu-ubuntu2204-base"),
        ("v5litepod-64", "v2-alpha-tpuv5-lite"),
        ("v5p-128", "v2-alpha-tpuv5"),
        ("v6e-16", "v2-alpha-tpuv6e"),
    ],
)
def test_a_slice_is_created_with_the_software_of_its_chip(type, version):
    place = ["--zone=z", "--project=p"]
    create = ["gcloud", "compute", "tpus", "tpu-vm", "create", "b16", *place]
    create += [f"--accelerator-type={type}"]
    assert tpu_vm("create", f"--type={type}") == [[*create, f"--version={version}"]]
    assert tpu_vm("create", f"--type={type}", "--spot") == [
        [*create, "--spot", f"--version={version}"]
    ]
    queued = ["gcloud", "compute", "tpus", "queued-resources", "create", "b16", *place]
    queued += [f"--accelerator-type={type}", "--spot"]
    assert tpu_vm("create", f"--type={type}", "--spot", "--queued") == [
        [*queued, "--node-id=b16", f"--runtime-version={version}"]
    ]
    assert tpu_vm("create", f"--type={type}", "--spot", "--slices=2") == [
        [*queued, "--node-count=2", "--node-prefix=b16", f"--runtime-version={version}"]
    ]


def test_every_worker_of_every_slice_is_installed_and_started_with_the_words_as_given():
    install = tpu_vm("install", "--slices=2", "--bucket=bkt")
    assert [command[:5] for command in install[1:-1]] == [
        ["gcloud", "compute", "tpus", "tpu-vm", verb] for verb in ("scp", "ssh") * 2
    ]
    assert [command[5] for command in install if "ssh" in command] == ["b16-0", "b16-1"]
    assert all("--worker=all" in command for command in install[1:-1])
    assert remote(install[2]) == ["vit_jax/launch/tpu_worker.sh", "install", "--bucket=bkt"]

    start = tpu_vm("start")
    assert [command[5] for command in start] == ["b16"] and "--worker=all" in start[0]
    assert remote(start[0]) == ["vit_jax/launch/tpu_worker.sh", "start", "--", *WORDS]


def test_workers_of_several_slices_are_given_all_that_slices_know_of_each_other():
    start = tpu_vm("start", "--slices=2")
    assert [command[5] for command in start] == ["b16-0", "b16-1"]
    for number, command in enumerate(start):
        script, action, *flags = remote(command)[: -len(WORDS) - 1]
        assert flags == ["--slices=2", f"--slice={number}", "--coordinator=ADDRESS"]
        service = shown("tpu_worker.sh", action, *flags, "--dry_run", "--", *WORDS)[-1]
        assert [word for word in service if "MEGASCALE" in word] == [
            "--setenv=MEGASCALE_NUM_SLICES=2",
            f"--setenv=MEGASCALE_SLICE_ID={number}",
            "--setenv=MEGASCALE_COORDINATOR_ADDRESS=ADDRESS",
            "--setenv=MEGASCALE_PORT=8081",
        ]
    one = shown("tpu_worker.sh", "start", "--dry_run", "--", *WORDS)[-1]
    assert not any("MEGASCALE" in word for word in one)


def test_a_worker_runs_the_supervisor_as_a_service_that_comes_back_unless_it_would_not_help():
    service = shown("tpu_worker.sh", "start", "--dry_run", "--", *WORDS)[-1]
    assert service[:3] == ["sudo", "systemd-run", "--quiet"] and "--unit=vit_jax" in service
    assert {
        "--property=Restart=on-failure",
        "--property=RestartPreventExitStatus=1 2",
        "--property=KillMode=mixed",
        "--property=RemainAfterExit=yes",
    } <= set(service)
    program = service.index(f"{ROOT}/.venv/bin/python")
    assert service[program + 1] == "launch/local.py"
    assert service[service.index("--") + 1 :] == list(WORDS)


def test_a_worker_mounts_the_bucket_where_the_manual_says():
    commands = shown("tpu_worker.sh", "install", "--bucket=bkt", "--dry_run")
    assert commands[-1][0] == "gcsfuse" and commands[-1][-2:] == ["bkt", "/mnt/bkt"]


def test_the_other_actions_on_a_slice():
    tpus = ["gcloud", "compute", "tpus"]
    place = ["--zone=z", "--project=p"]
    assert tpu_vm("delete") == [[*tpus, "tpu-vm", "delete", "b16", *place, "--quiet"]]
    assert tpu_vm("delete", "--queued") == [
        [*tpus, "queued-resources", "delete", "b16", *place, "--quiet", "--force"]
    ]
    assert "journalctl" in remote(tpu_vm("logs", "--worker=3")[0])
    assert "--worker=3" in tpu_vm("logs", "--worker=3")[0]
    assert remote(tpu_vm("stop")[0]) == ["sudo", "systemctl", "stop", "vit_jax"]
    assert "describe" in tpu_vm("status")[0]


# Answers of gcloud, one after the other: states of the slice, then of the service on its workers.
GCLOUD = """#!/usr/bin/env bash
echo "$*" >> "$FOLDER/calls"
case "$*" in
  *describe*) file=states ;;
  *SubState*) file=services ;;
  *" $FAIL "*) exit 1 ;;
  *" $FAIL_ONCE "*) [ -e "$FOLDER/failed" ]; code=$?; touch "$FOLDER/failed"; exit $code ;;
  *) exit 0 ;;
esac
head -n 1 "$FOLDER/$file" | tr , '\\n'
sed -i 1d "$FOLDER/$file"
"""


def keep(
    tmp_path, states: str, services: str, fail_once="-", fail="-", flags=()
) -> tuple[int, str, list[str]]:
    """Exit code, output, and what was done, of `keep` with a gcloud that gives these answers, and
    fails at its first `fail_once` and at every `fail`.
    """
    (tmp_path / "gcloud").write_text(GCLOUD)
    (tmp_path / "gcloud").chmod(0o755)
    (tmp_path / "states").write_text("\n".join(states.split(" ")) + "\n")
    (tmp_path / "services").write_text("\n".join(services.split(" ")) + "\n")
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "FOLDER": str(tmp_path),
        "FAIL_ONCE": fail_once,
        "FAIL": fail,
    }
    result = run("tpu_vm.sh", "keep", "--name=b16", "--zone=z", "--type=v5litepod-64", "--spot",
                 "--every=0", *flags, "--", *TRAIN, env=environment)  # fmt: skip
    calls = (tmp_path / "calls").read_text().splitlines()
    verbs = [call.split()[3] for call in calls if "describe" not in call and "SubState" not in call]
    return result.returncode, result.stdout + result.stderr, verbs


MADE = ["create", "scp", "ssh", "ssh"]


def test_keep_makes_a_slice_starts_the_run_and_ends_when_it_is_done(tmp_path):
    code, output, done = keep(
        tmp_path, " CREATING READY READY READY", "start,running running exited"
    )
    assert (code, done) == (0, MADE) and "the run is done" in output


def test_keep_makes_a_slice_that_was_taken_away_anew_and_goes_on(tmp_path):
    code, _, done = keep(tmp_path, "READY PREEMPTED DELETING  READY", "running exited")
    assert (code, done) == (0, ["delete", *MADE])


@pytest.mark.parametrize("verb", ["create", "scp", "delete"])
def test_keep_tries_again_what_fails(tmp_path, verb):
    code, _, done = keep(
        tmp_path, "PREEMPTED PREEMPTED   READY READY", "dead exited", fail_once=verb
    )
    expected = {
        "create": ["delete", "delete", "create", *MADE, "scp", "ssh", "ssh"],
        "scp": ["delete", "delete", "create", "scp", *MADE, "scp", "ssh", "ssh"],
        "delete": ["delete", "delete", *MADE, *MADE, "scp", "ssh", "ssh"],
    }
    assert (code, done) == (0, expected[verb])


def test_keep_starts_the_run_again_where_a_worker_is_new_and_waits_where_none_answers(tmp_path):
    code, _, done = keep(tmp_path, "READY READY READY", " dead,running exited")
    assert (code, done) == (0, ["scp", "ssh", "ssh"])


def test_keep_ends_with_an_error_that_a_restart_will_not_cure(tmp_path):
    code, output, done = keep(tmp_path, "READY READY", "running failed")
    assert (code, done) == (1, ["ssh"]) and "will not cure" in output and "COSTS" in output


@pytest.mark.parametrize(("verb", "each"), [("scp", ["scp"]), ("ssh", ["scp", "ssh"])])
def test_keep_gives_up_when_a_slice_cannot_be_installed_and_says_that_it_costs(
    tmp_path, verb, each
):
    states = " " + " ".join(["READY"] * 9)
    code, output, done = keep(tmp_path, states, "dead " * 9, fail=verb, flags=["--max_attempts=3"])
    assert (code, done) == (1, ["create", *each * 3])
    assert "failed 3 times in a row" in output
    assert "COSTS until: launch/tpu_vm.sh delete --name=b16 --zone=z" in output


def test_keep_waits_for_capacity_as_long_as_it_takes_since_nothing_costs(tmp_path):
    code, output, done = keep(
        tmp_path, "   READY READY", "exited", fail_once="create", flags=["--max_attempts=1"]
    )
    assert (code, done[:3]) == (0, ["create", "create", "scp"])


def test_the_xpk_command():
    (command,) = shown("gke/xpk.sh", "--cluster=c", "--name=b16", "--type=v5p-256", "--image=IMAGE",
                       "--slices=2", "--dry_run", "--", *WORDS)  # fmt: skip
    assert command[:3] == ["xpk", "workload", "create"]
    assert {"--cluster=c", "--workload=b16", "--tpu-type=v5p-256", "--num-slices=2",
            "--max-restarts=100"} <= set(command)  # fmt: skip
    line = command[-1].removeprefix("--command=")
    assert shlex.split(line) == ["python", "-m", "vit_jax", *WORDS]


def test_what_each_node_of_a_slurm_job_runs():
    srun, requeue = shown("slurm/train.sbatch", *WORDS)
    assert srun[0] == "srun" and "--wait=60" in srun
    assert srun[-len(WORDS) - 3 :][1:] == ["-m", "vit_jax", *WORDS]
    assert "--cpu-bind=none" in srun  # all cores of the node
    assert requeue[:2] == ["scontrol", "requeue"]


NAMED = ("--dry_run", "--name=b", "--zone=z")
SLICE = ("create", *NAMED, "--type=v5litepod-64")
XPK = ("--dry_run", "--cluster=c", "--image=i", "--", "train")


@pytest.mark.parametrize(
    ("script", "arguments", "words"),
    [
        ("tpu_vm.sh", ("create", *NAMED, "--typ=v4-8"), "there is no flag --typ"),
        ("tpu_vm.sh", ("create", *NAMED), "--type=… is needed"),
        ("tpu_vm.sh", ("create", *NAMED, "--type=tpu7x-8"), "launch/gke"),
        ("tpu_vm.sh", ("create", *NAMED, "--type=v5litepod-65"), "no slice of '65'"),
        ("tpu_vm.sh", ("start", *NAMED), "what is to run?"),
        ("tpu_vm.sh", ("make",), "which action? not make"),
        ("tpu_vm.sh", (*SLICE, "--slices=two"), "--slices=two"),
        ("tpu_vm.sh", (*SLICE, "--slices=0"), "--slices=0"),
        ("tpu_vm.sh", (*SLICE, "--slices="), "--slices="),
        ("tpu_vm.sh", (*SLICE, "--slices"), "--slices needs a value"),
        ("tpu_vm.sh", (*SLICE, "--slices", "2"), "--slices needs a value"),
        ("tpu_vm.sh", (*SLICE, "--spot=no"), "--spot takes no value"),
        ("tpu_vm.sh", (*SLICE, "two"), "two is not a flag"),
        ("tpu_vm.sh", (*SLICE, "--every=soon"), "--every=soon"),
        ("tpu_vm.sh", (*SLICE, "--max_attempts=0"), "--max_attempts=0"),
        ("tpu_vm.sh", (*SLICE, "--slice=1"), "--slice=1: there are 1"),
        ("tpu_vm.sh", (*SLICE, "--name=B_16"), "--name=B_16"),
        ("tpu_vm.sh", (*SLICE, "--bucket=gs://b"), "without gs://"),
        ("tpu_worker.sh", ("start", "--slices=2", "--", "train"), "--coordinator=… is needed"),
        ("gke/xpk.sh", ("--dry_run", "--name=b"), "--cluster=… is needed"),
        ("gke/xpk.sh", ("--name=B", "--type=v5p-8", *XPK), "--name=B"),
        ("gke/xpk.sh", ("--name=b", "--type=v5p-9", *XPK), "no slice of '9'"),
        ("gke/xpk.sh", ("--name=b", "--type=v5p-8", "--slices=x", *XPK), "--slices=x"),
        ("slurm/train.sbatch", ("train",), "what is to run?"),
    ],
)
def test_a_wrong_command_line_ends_with_one_sentence_before_anything_is_done(
    script, arguments, words
):
    result = run(script, *arguments)
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert not result.stdout and "line " not in result.stderr  # as errors of bash itself begin


def test_a_slurm_job_with_a_limit_that_is_no_number_is_refused():
    result = run("slurm/train.sbatch", *WORDS, env=os.environ | {"MAX_RESTARTS": "many"})
    assert result.returncode == 2 and "MAX_RESTARTS=many" in result.stderr
