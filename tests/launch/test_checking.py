"""What is looked at in a training command before anything is started."""

import json

import pytest

from launch import checking
from launch.checking import Site, check_command
from vit_jax.base.errors import ConfigError
from vit_jax.commands.main import COMMANDS

POD = Site("cpu:8", buckets={"/mnt/bkt": "gs://bkt"}, sent=False)
CLUSTER = Site("cpu:8", gpus=8, shared_disk=True)  # as of Ray


@pytest.mark.parametrize(
    ("site", "command", "message"),
    [
        (POD, ["train", "--config=digits"], "--workdir=DIR is missing"),
        (POD, ["train", "--workdir=/mnt/bkt/run"], "mounted to be read only; set --workdir=gs://bkt/run"),
        (POD, ["train", "--workdir=/mnt/bkt"], "mounted to be read only; set --workdir=gs://bkt"),
        (POD, ["train", "--workdir=runs/x"], "must be in a bucket"),
        (POD, ["train", "--workdir=/data/x"], "must be in a bucket"),
        (POD, ["train", "--workdir=s3://bkt/x"], "cannot be saved in S3"),
        (POD, ["train", "--workdir=gs://b/x", "--config=/home/me/mine.py"], "on this machine only"),
        (POD, ["train", "--workdir=gs://b/x", "--config=mine.py:B/16"], "set --image=IMAGE"),
        (POD, ["train", "--workdir=gs://b/x", "--config=digits", "--register=../m.py"], "--register=../m.py"),
        (CLUSTER, ["train", "--workdir=runs/x"], "absolute, on a disk that all machines see"),
    ],
)  # fmt: skip
def test_what_would_fail_there_is_refused(site, command, message):
    with pytest.raises(ConfigError) as refused:
        check_command(command, site)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ([], "what is to run?"),
        (["trian", "--config=digits"], "did you mean 'train'"),
        (["launch", "gke"], "does not launch itself"),
    ],
)
def test_what_cannot_be_launched_is_refused(command, message):
    with pytest.raises(ConfigError) as refused:
        checking.check_name(command, COMMANDS)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--config.modle.name=ViT-B/16", "modle"),
        ("--config.mesh.tensor=5", "does not fit the 8 devices"),
        ("--config.batch_size=12", "cannot be spread over 8 devices"),
        ("--config.duration=0 steps", "no step of training"),
    ],
)
def test_what_its_own_dry_run_refuses_is_refused(quick_check, tmp_path, change, message):
    command = ["train", "--config=digits", f"--workdir={tmp_path}/run", change]
    with pytest.raises(ConfigError) as refused:
        check_command(command, CLUSTER)
    assert "nothing was started" in str(refused.value) and message in str(refused.value)


def test_data_of_a_mounted_bucket_is_read_from_the_bucket_itself(quick_check, bucket):
    pod = Site("cpu:8", buckets={"/mnt/bkt": bucket})
    command = ["train", "--config=folder", f"--workdir={bucket}/run"]
    found = check_command([*command, "--config.data.path=/mnt/bkt/data"], pod)
    (data, *_) = found.unchecked
    assert f"{bucket}/data" in data and "/mnt/bkt" not in data


def test_what_cannot_be_checked_is_refused_unless_it_is_allowed(launch, stand_in):
    calls = stand_in("kubectl", "")
    evaluate = ("evaluate", "--follow", "--checkpoint=gs://b/run")
    flags = ("--name=b", "--topology=v5e:8x8", "--image=i")
    code, out, err = launch("gke", *flags, "--", *evaluate)
    assert code == 2 and "'evaluate' has no --dry_run" in err and "set --unchecked" in err
    assert "create" not in calls.read_text()
    code, out, err = launch("gke", *flags, "--unchecked", "--dry_run", "--", *evaluate)
    assert code == 0 and "not checked, since --unchecked is set" in err and "kind: JobSet" in out


LAPTOP = ("train", "--config=folder", "--config.data.path=/shared/images", "--workdir=/shared/run")


@pytest.mark.parametrize(
    ("engine", "program"),
    [
        (("slurm", "--nodes=4", "--gpus_per_node=2"), "train.sbatch"),
        (("ray", "--address=auto", "--nodes=4", "--gpus_per_node=2"), "python -m vit_jax"),
        (("local", "--processes=2", "--devices_per_process=4"), "local.py"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_a_dry_run_where_the_data_is_not_prints_the_command_and_what_was_not_checked(
    launch, engine, program
):
    code, out, err = launch(*engine, "--dry_run", "--", *LAPTOP)
    assert code == 0, err
    assert program in out and "--config.data.path=/shared/images" in out
    assert err.count("config.data.path = '/shared/images' does not exist") == 1
    assert "steps, memory, time and cost" in err and "--unchecked" in err


def test_a_run_whose_data_is_not_here_is_not_started_without_unchecked(launch):
    code, out, err = launch("slurm", "--nodes=4", "--gpus_per_node=2", "--", *LAPTOP)
    assert code == 2 and "nothing was started" in err and "sbatch" not in out


def test_a_bucket_that_does_not_answer_is_asked_once_and_reported_once(launch, bucket, faults):
    faults.inject("status", status=404)
    faults.forget_requests()
    words = ("--config=folder", "--config.data.name=prepared", f"--workdir={bucket}/run")
    name = bucket.removeprefix("gs://")
    flags = ("--name=b", "--topology=v5e:8x8", "--image=i", f"--bucket={name}", "--dry_run")
    code, out, err = launch(
        "gke", *flags, "--", "train", *words, f"--config.data.path=/mnt/{name}/x"
    )
    assert code == 0 and "kind: JobSet" in out, err
    assert err.count("there is no such bucket") == 1
    assert f"config.data.path={bucket}/x: {bucket} cannot be read from here" in err
    assert len(faults.requests()) == 1


def test_of_an_experiment_whose_data_is_not_here_each_run_says_so(command):
    words = (
        "--config=experiments/pooling",
        "--config.data.name=folder",
        "--config.data.path=/shared/x",
    )
    code, out, err = command(
        "train", *words, "--workdir=/shared/run", "--dry_run", "--topology=cpu:8"
    )
    assert code == 0, err
    lines = out.splitlines()
    assert len(lines) > 1 and all("'/shared/x' does not exist" in line for line in lines)


def test_a_missing_compiler_is_reported_and_the_mesh_is_checked_all_the_same(
    command, monkeypatch, tmp_path
):
    from vit_jax.planning import elsewhere

    def find(name, *, slices=1):
        if not name.startswith("cpu"):
            raise ConfigError("needs the TPU compiler: install the extra plan")
        return real(name, slices=slices)

    real = elsewhere.find
    monkeypatch.setattr(elsewhere, "find", find)
    words = ("train", "--config=digits", f"--workdir={tmp_path}", "--dry_run", "--json")
    code, out, err = command(*words, "--topology=v5e:2x2")
    assert code == 0, err
    (sentence,) = json.loads(out.splitlines()[-1])["unchecked"]
    assert sentence.startswith("memory, time and cost") and "the extra plan" in sentence
    code, _, err = command(*words, "--topology=v5e:2x2", "--config.mesh.tensor=3")
    assert code == 2 and "does not fit the 4 devices" in err


def test_the_memory_of_this_machine_is_none_of_a_run_elsewhere(command, monkeypatch, tmp_path):
    monkeypatch.setattr("vit_jax.devices.local.memory_bytes", lambda: 1000)
    words = ("train", "--config=digits", f"--workdir={tmp_path}", "--dry_run")
    code, _, err = command(*words)
    assert code == 2 and "this machine has" in err
    assert command(*words, "--topology=cpu:8")[0] == 0


def test_a_topology_is_for_dry_runs(command, tmp_path):
    code, _, err = command(
        "train", "--config=digits", f"--workdir={tmp_path}", "--topology=v5e:2x2"
    )
    assert code == 2 and "--topology=v5e:2x2 is for --dry_run" in err


def test_the_command_is_checked_in_a_process_of_its_own_with_as_many_devices(tmp_path):
    words = ["train", "--config=digits", f"--workdir={tmp_path}/run"]
    found = check_command(words, Site("cpu:16", gpus=16, shared_disk=True), price=1.0)
    assert found.unchecked == [] and found.local == ""
    text = "\n".join(found.lines)
    for part in ("ViT-mu/4", "1,438 images", "899 steps", "hours on 16 GPUs", "cost at least"):
        assert part in text
    # 899 steps of 64 images.
    assert found.reads == pytest.approx(899 * 64 * checking.IMAGE_BYTES)


@pytest.mark.slow
def test_the_command_is_planned_for_slices_of_a_tpu(tmp_path):
    words = ["train", "--config=digits", f"--workdir={tmp_path}/run"]
    found = check_command(words, Site("v5e:2x2", slices=2, remote=False), price=1.0)
    assert found.unchecked == []
    text = "\n".join(found.lines)
    for part in ("memory of a device", "hours on 8 chips of 2 hosts", "chip-hours, cost"):
        assert part in text


def test_a_launched_evaluation_joins_the_processes_that_its_engine_starts():
    from launch.main import joining_others

    assert joining_others(["evaluate", "--checkpoint=x"])[-1] == "--coordinator=auto"
    given = ["evaluate", "--checkpoint=x", "--coordinator=h:1"]
    assert joining_others(given) == given
    assert joining_others(["train", "--workdir=x"]) == ["train", "--workdir=x"]


def test_a_workdir_that_each_machine_has_for_itself_is_warned_of(capsys):
    from launch import checking

    slurm = checking.Site(remote=False, several_machines=True)
    for site in (checking.Site(shared_disk=True), slurm):
        for workdir in ("/tmp/run", "/tmp", "/dev/shm/run"):
            checking._check_workdir("train", workdir, site)
            warning = capsys.readouterr().err
            assert f"--workdir={workdir} is a folder that each machine usually has" in warning
        checking._check_workdir("train", "/shared/run", site)
        assert capsys.readouterr().err == ""
    checking._check_workdir("train", "/tmp/run", checking.Site(remote=False))
    assert capsys.readouterr().err == ""
