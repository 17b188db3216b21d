"""What `vit_jax launch` would run for SLURM, xpk, SkyPilot, Ray and on this machine, and what it refuses."""

import importlib.metadata
import os
import pathlib
import shlex
import subprocess
import sys

import pytest
import yaml

from launch.engines import ray, xpk
from vit_jax import __version__
from vit_jax.devices import chips

ROOT = pathlib.Path(__file__).resolve().parents[2]
SBATCH = str(ROOT / "launch/slurm/train.sbatch")
AS_GIVEN = """--config.log.wandb=a 'quoted' "name" & more"""


@pytest.fixture
def words(tmp_path) -> list[str]:
    return ["train", "--config=digits", f"--workdir={tmp_path}/run", AS_GIVEN]


@pytest.fixture
def in_bucket(bucket) -> list[str]:
    return ["train", "--config=digits", f"--workdir={bucket}/b16", AS_GIVEN]


def test_the_scripts_have_no_faults_that_shellcheck_knows():
    shellcheck = pathlib.Path(sys.executable).with_name("shellcheck")
    scripts = [
        *ROOT.glob("launch/**/*.sh"),
        *ROOT.glob("launch/**/*.sbatch"),
        *ROOT.glob("tools/*.sh"),
    ]
    assert len(scripts) >= 5
    command = [shellcheck, "--external-sources", "--severity=warning", *map(str, scripts)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stdout


def test_no_file_beside_the_scripts_hides_a_package_from_them():
    # Python puts the folder of a script, as quickstart.py is one, before all packages.
    names = {path.stem for path in (ROOT / "launch").glob("*.py")} - {"__init__"}
    packages = importlib.metadata.packages_distributions()
    assert "google" in packages and "quickstart" in names
    assert not names & {*packages, *sys.stdlib_module_names}


def test_a_slurm_job_gets_its_nodes_gpus_and_further_flags_of_sbatch(shown, words):
    flags = ("--nodes=2", "--gpus_per_node=4", "--queue=long", "--grace=900", "--max_restarts=7")
    (command,) = shown("slurm", *flags, "--", *words, "--", "--time=24:00:00", "--account=v")
    assert command == [
        "env", f"PYTHON={os.environ.get('PYTHON', sys.executable)}", "MAX_RESTARTS=7",
        "sbatch", "--job-name=vit_jax", "--nodes=2", "--gpus-per-node=4", "--ntasks-per-node=4",
        "--signal=TERM@900", "--partition=long", "--time=24:00:00", "--account=v", SBATCH, *words,
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        (["--gpus_per_node=8", "--processes_per_node=1"], ["--ntasks-per-node=1"]),
        (["--processes_per_node=2"], ["--ntasks-per-node=2"]),
        ([], []),  # the script asks SLURM for the GPUs
    ],
)
def test_a_flag_sets_the_processes_of_a_slurm_node(shown, words, flags, tasks):
    (command,) = shown("slurm", *flags, "--", *words)
    assert [word for word in command if "ntasks" in word] == tasks


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, {"--ntasks-per-node=1", "--ntasks=2", "--cpu-bind=none"}),
        (
            {"SLURM_GPUS_ON_NODE": "8", "SLURM_GPUS_PER_NODE": "h100:4"},
            {"--ntasks-per-node=4", "--ntasks=8", "--cpus-per-task=24"},
        ),
        ({"SLURM_GPUS_ON_NODE": "8"}, {"--ntasks-per-node=8", "--ntasks=16", "--cpus-per-task=12"}),
        (
            {"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS_PER_NODE": "1", "SLURM_NTASKS": "2"},
            {"--ntasks-per-node=1", "--ntasks=2", "--cpu-bind=none"},
        ),
        (
            {"SLURM_GPUS_ON_NODE": "8", "SLURM_NTASKS": "4"},
            {"--ntasks-per-node=2", "--ntasks=4", "--cpus-per-task=48"},
        ),
    ],
)
def test_the_sbatch_file_starts_one_process_for_each_gpu_unless_told_otherwise(
    words, variables, expected
):
    job = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "96", **variables}
    done = subprocess.run(
        ["bash", SBATCH, "--dry_run", *words], capture_output=True, text=True, env=os.environ | job
    )
    assert expected <= set(shlex.split(done.stdout.splitlines()[0]))


def test_the_sbatch_file_passes_the_words_to_each_node(words):
    done = subprocess.run(["bash", SBATCH, "--dry_run", *words], capture_output=True, text=True)
    srun, requeue = [shlex.split(line) for line in done.stdout.splitlines()]
    assert srun[0] == "srun" and "--wait=60" in srun
    assert srun[-len(words) - 3 :][1:] == ["-m", "vit_jax", *words]
    assert "--cpu-bind=none" in srun  # all cores of the node
    assert requeue[:2] == ["scontrol", "requeue"]
    for arguments, variables, message in (
        (["train"], {}, "what is to run?"),
        (words, {"MAX_RESTARTS": "many"}, "MAX_RESTARTS=many"),
    ):
        done = subprocess.run(
            ["bash", SBATCH, *arguments], env=os.environ | variables, capture_output=True, text=True
        )
        assert done.returncode == 2 and message in done.stderr


def test_a_slurm_run_is_checked_for_its_gpus_and_hours_are_estimated(launch, words):
    flags = ("--nodes=2", "--gpus_per_node=4", "--price_per_chip_hour=2")
    code, out, err = launch("slurm", *flags, "--dry_run", "--", *words)
    assert code == 0 and "hours on 8 GPUs like NVIDIA H100" in out and "cost at least" in out, err
    code, out, err = launch("slurm", *flags, "--dry_run", "--", *words, "--config.batch_size=12")
    assert code == 2 and "cannot be spread over 8 devices" in err and not out


def test_the_xpk_command(shown, in_bucket):
    flags = ("--cluster=c", "--name=b16", "--topology=v5p:2x4x4", "--image=I", "--slices=2")
    flags += ("--priority=high",)
    local = "--config.checkpoint.local=/local"
    (command,) = shown("xpk", *flags, "--", *in_bucket, local, "--", "--env=A=B")
    assert command[:3] == ["xpk", "workload", "create"]
    assert {
        "--cluster=c", "--workload=b16", "--tpu-type=v5p-64", "--num-slices=2", "--docker-image=I",
        "--max-restarts=100",
        "--termination-grace-period-seconds=120", "--ttl-seconds-after-finished=604800", "--priority=high",
        "--mtc-enabled", "--ramdisk-directory=/local", "--env=A=B",
    } <= set(command)  # fmt: skip
    line = command[-1].removeprefix("--command=")
    assert shlex.split(line) == ["python", "-m", "vit_jax", *in_bucket, local]


@pytest.mark.parametrize(("kind", "tpu"), chips.TPUS.items())
def test_every_slice_that_plan_knows_has_a_type_of_xpk_or_a_reason(kind, tpu):
    for shape in tpu.shapes()[-2:]:
        try:
            assert xpk.tpu_type(f"{kind}:{shape}").startswith(f"{tpu.vm or kind}-")
        except ValueError as error:
            assert "use 'vit_jax launch gke'" in str(error)
    assert xpk.tpu_type("tpu7x:4x4x4") == "tpu7x-128"


def test_the_command_of_skypilot(shown, in_bucket):
    (command,) = shown(
        "skypilot", "--name=b16", "--nodes=2", "--gpus_per_node=4", "--", *in_bucket, "--", "--yes"
    )
    assert command[:3] == ["sky", "launch", "--cluster=b16"] and command[-2] == "--yes"
    assert {
        "--num-nodes=2", "--gpus=H100:4", "--env=EXTRA=cuda13,gcs", "--env=VERSION=", "--env=PROCESSES_PER_NODE=4",
    } <= set(command)  # fmt: skip
    (text,) = [word for word in command if word.startswith("--env=COMMAND=")]
    assert shlex.split(text.removeprefix("--env=COMMAND=")) == in_bucket
    assert command[-1] == str(ROOT / "launch/skypilot/train.yaml")
    tpu = ("--topology=v5e:4x4", "--spot", "--env=A=B")
    (command,) = shown("skypilot", "--name=b16", *tpu, "--", *in_bucket)
    assert command[:4] == ["sky", "jobs", "launch", "--use-spot"]
    assert {
        "--gpus=tpu-v5litepod-16", "--env=EXTRA=tpu,gcs", "--env=A=B", "--env=PROCESSES_PER_NODE=1",
    } <= set(command)  # fmt: skip


def scaling(**given) -> dict:
    defaults = {"nodes": 1, "gpus_per_node": 0, "processes_per_node": 0, "cpus_per_process": 1}
    return ray.scaling_of(type("Options", (), defaults | {"topology": "", "slices": 1} | given))


def test_the_workers_of_ray():
    assert scaling(nodes=4, gpus_per_node=8, processes_per_node=1) == {
        "num_workers": 4, "resources_per_worker": {"CPU": 1, "GPU": 8}, "use_gpu": True,
    }  # fmt: skip
    each = scaling(nodes=4, gpus_per_node=8, cpus_per_process=6)
    assert each["num_workers"] == 32 and each["resources_per_worker"] == {"CPU": 6, "GPU": 1}
    assert scaling(nodes=4) == {"num_workers": 4, "resources_per_worker": {"CPU": 1}}
    tpus = scaling(topology="v5e:8x8", slices=2)
    assert tpus["num_workers"] == 32 and tpus["accelerator_type"] == "TPU-V5LITEPOD"
    assert tpus["resources_per_worker"]["TPU"] == 4 and tpus["topology"] == "8x8"


def test_processes_of_this_machine_are_those_of_the_supervisor(shown, words):
    flags = ("--processes=2", "--devices_per_process=1", "--grace=5")
    (command,) = shown("local", *flags, "--", *words)
    assert command[1] == str(ROOT / "launch/local.py")
    split = command.index("--")
    assert set(flags) <= set(command[:split]) and command[split + 1 :] == words


NAMED = ("--name=b", "--zone=us-east5-b")
SLICE = ("create", *NAMED, "--topology=v5e:8x8")
XPK = ("--cluster=c", "--image=i", "--name=b")


@pytest.mark.parametrize(
    ("engine", "arguments", "message"),
    [
        ("gk", (), "there is no engine 'gk'; did you mean 'gke'?"),
        ("tpu_vm", ("create", *NAMED, "--typ=v4-8"), "there is no flag --typ"),
        ("tpu_vm", ("create", *NAMED, "--type=v4-8"), "is now --topology"),
        ("tpu_vm", ("create", *NAMED), "--topology=… is missing"),
        ("tpu_vm", ("start", *NAMED), "--topology=… is missing"),
        ("tpu_vm", ("create", *NAMED, "--topology=tpu7x:2x2x1"), "vit_jax launch gke"),
        ("tpu_vm", ("create", *NAMED, "--topology=v5e:65"), "no slice '65'"),
        ("tpu_vm", ("make",), "actions of tpu_vm are keep, create"),
        ("tpu_vm", ("create", "--name=b", "--zone=z"), "--zone=z: must be a zone"),
        ("tpu_vm", (*SLICE, "--slices=two"), "--slices=two"),
        ("tpu_vm", (*SLICE, "--slices=0"), "--slices=0"),
        ("tpu_vm", (*SLICE, "--slices="), "--slices="),
        ("tpu_vm", (*SLICE, "--spot=perhaps"), "--spot=perhaps"),
        ("tpu_vm", (*SLICE, "--spot", "--reserved"), "one or the other"),
        ("tpu_vm", (*SLICE, "two"), "nothing is expected here but flags"),
        ("tpu_vm", (*SLICE, "--every=soon"), "--every=soon"),
        ("tpu_vm", (*SLICE, "--max_attempts=0"), "--max_attempts=0"),
        ("tpu_vm", (*SLICE, "--slice=1"), "--slice=1: there are 1"),
        ("tpu_vm", (*SLICE, "--name=B_16"), "--name=B_16"),
        ("tpu_vm", (*SLICE, "--bucket=gs://b"), "without gs://"),
        ("tpu_vm", ("keep", *SLICE[1:]), "what is to run?"),
        ("tpu_vm", ("stop", *NAMED, "--", "--", "--quiet"), "'stop' takes no flags of gcloud's own"),
        ("xpk", ("--name=b",), "--cluster=… is missing"),
        ("xpk", (*XPK, "--name=B", "--topology=v5p:2x2x1"), "--name=B"),
        ("xpk", (*XPK, "--topology=v5p:9"), "no slice '9'"),
        ("xpk", (*XPK, "--topology=v5p:4x4x16"), "which is 4x8x8"),
        ("xpk", (*XPK, "--topology=v5p:2x2x1", "--priority=urgent"), "--priority=urgent"),
        ("slurm", ("--nodes=0",), "--nodes=0: must be 1 or more"),
        ("slurm", ("--gpus_per_node=8", "--processes_per_node=3"), "divided among them evenly"),
        ("slurm", ("--time=24:00:00",), "behind the training command"),
        ("slurm", ("--nodes=2",), "what is to run?"),
        ("ray", ("--nodes=0",), "--nodes=0"),
        ("ray", ("--nodes=two",), "--nodes=two"),
        ("ray", ("--num_workers=2",), "is now --nodes"),
        ("ray", ("--gpus_per_node=-1",), "--gpus_per_node=-1"),
        ("ray", ("--topology=v5e:3x3",), "no slice '3x3'"),
        ("ray", ("--topology=v5e:4x8", "--nodes=4"), "have 8 hosts"),
        ("ray", ("--topology=v5e:4x8", "--gpus_per_node=1"), "set one of them"),
        ("ray", ("--slices=2",), "is for TPUs"),
        ("ray", ("--env=JAX_PLATFORMS",), "NAME=VALUE"),
        ("ray", ("--", "train", "--workdir=r", "--", "--verbose"), "calls no program"),
        ("skypilot", ("--name=b", "--topology=v5e:4x4", "--nodes=2"), "--nodes=2: a TPU slice"),
        ("skypilot", ("--name=b", "--topology=v5e:4x4", "--processes_per_node=4"), "is for GPUs"),
        ("skypilot", ("--name=b", "--processes_per_node=3"), "8 GPUs of a node cannot be divided"),
        ("local", ("--processes=0",), "--processes=0: must be 1 or more"),
        ("local", ("--backoff=nan",), "--backoff=nan"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_ends_with_one_sentence_before_anything_is_done(
    launch, engine, arguments, message
):
    code, out, err = launch(engine, *arguments)
    assert code == 2 and message in err.splitlines()[-1], err
    assert not out


def test_help_lists_the_engines_and_the_flags_of_one(command):
    code, out, _ = command("launch", "--help")
    assert code == 0 and "gke, tpu_vm, xpk, slurm, ray, skypilot and local" in out
    code, out, _ = command("launch", "slurm", "--help")
    assert code == 0 and "--gpus_per_node: " in out and "--topology" not in out
    assert "Flags of 'sbatch' stand behind" in out


def test_the_file_of_skypilot_names_this_project_s_variables():
    envs = yaml.safe_load((ROOT / "launch/skypilot/train.yaml").read_text())["envs"]
    assert (
        set(envs) == {"COMMAND", "EXTRA", "VERSION", "MAX_RESTARTS", "PROCESSES_PER_NODE"}
        and __version__
    )
