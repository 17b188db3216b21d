"""`vit_jax launch tpu_vm`: the commands that it runs, and what it does about what a cloud answers."""

import shlex
import subprocess

import pytest

from tests.launch.test_scripts import ROOT

PLACE = ("--name=b16", "--zone=europe-west4-b", "--project=p")
WHERE = ["--zone=europe-west4-b", "--project=p"]
AS_GIVEN = """--config.log.wandb=a 'quoted' "name" & more"""


@pytest.fixture
def words(bucket) -> list[str]:
    return ["train", "--config=digits", f"--workdir={bucket}/b16", AS_GIVEN]


@pytest.fixture
def tpu_vm(shown, words):
    """`tpu_vm(action, *flags)`: what an action would run."""

    def tpu_vm(action: str, *flags: str) -> list[list[str]]:
        first, _, further = " ".join(flags).partition(" -- ")
        end = ["--", *further.split()] if further else []
        return shown("tpu_vm", action, *PLACE, *first.split(), "--", *words, *end)

    return tpu_vm


def remote(command: list[str]) -> list[str]:
    """The words of the line that `gcloud … ssh` runs over there, from the last && on."""
    line = [word for word in command if word.startswith("--command=")][0].partition("=")[2]
    return shlex.split(line.rpartition("&& ")[2])


def worker(*words: str) -> list[list[str]]:
    """The commands that launch/tpu_worker.sh would run."""
    command = ["bash", str(ROOT / "launch/tpu_worker.sh"), *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [shlex.split(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("topology", "accelerator", "version"),
    [
        ("v4:2x2x4", ["--accelerator-type=v4-32"], "tpu-ubuntu2204-base"),
        ("v5e:8x8", ["--accelerator-type=v5litepod-64"], "v2-alpha-tpuv5-lite"),
        ("v5p:4x4x4", ["--accelerator-type=v5p-128"], "v2-alpha-tpuv5"),
        ("v5p:4x4x16", ["--type=v5p", "--topology=4x4x16"], "v2-alpha-tpuv5"),
        ("v6e:4x4", ["--accelerator-type=v6e-16"], "v2-alpha-tpuv6e"),
    ],
)
def test_a_slice_is_created_with_the_software_of_its_chip(tpu_vm, topology, accelerator, version):
    create = ["gcloud", "compute", "tpus", "tpu-vm", "create", "b16", *WHERE, *accelerator]
    assert tpu_vm("create", f"--topology={topology}") == [[*create, f"--version={version}"]]
    queued = ["gcloud", "compute", "tpus", "queued-resources", "create", "b16", *WHERE]
    queued += [*accelerator, "--spot"]
    assert tpu_vm("create", f"--topology={topology} --spot --queued") == [
        [*queued, "--node-id=b16", f"--runtime-version={version}"]
    ]
    assert tpu_vm("create", f"--topology={topology} --spot --slices=2") == [
        [*queued, "--node-count=2", "--node-prefix=b16", f"--runtime-version={version}"]
    ]


def test_reservations_networks_accounts_and_flags_of_gcloud_itself_reach_gcloud(tpu_vm):
    flags = "--topology=v5e:8x8 --reserved --internal_ips --network=n --subnetwork=s --service_account=a@b"
    (create,) = tpu_vm("create", f"{flags} -- --labels=team=vision --shielded-secure-boot")
    assert create[9:] == [
        "--reserved", "--internal-ips", "--network=n", "--subnetwork=s", "--service-account=a@b",
        "--scopes=cloud-platform", "--version=v2-alpha-tpuv5-lite", "--labels=team=vision", "--shielded-secure-boot",
    ]  # fmt: skip
    assert "--internal-ip" in tpu_vm("start", "--topology=v5e:8x8 --internal_ips")[0]
    scp, *_ = tpu_vm("install", "--internal_ips --tunnel_through_iap")
    assert "--tunnel-through-iap" in scp and "--internal-ip" not in scp


def test_every_worker_of_every_slice_is_installed_and_started_with_the_words_as_given(
    tpu_vm, words
):
    install = tpu_vm("install", "--slices=2 --bucket=bkt")
    assert [command[:5] for command in install] == [
        ["gcloud", "compute", "tpus", "tpu-vm", verb] for verb in ("scp", "ssh") * 2
    ]
    assert [command[5] for command in install if "ssh" in command] == ["b16-0", "b16-1"]
    assert all("--worker=all" in command for command in install)
    assert remote(install[1]) == ["bash", "vit_jax/launch/tpu_worker.sh", "install", "--bucket=bkt"]

    start = tpu_vm("start", "--topology=v5e:8x8")
    assert [command[5] for command in start] == ["b16"] and "--worker=all" in start[0]
    assert remote(start[0]) == ["bash", "vit_jax/launch/tpu_worker.sh", "start", "--", *words]


def test_workers_of_several_slices_are_given_all_that_slices_know_of_each_other(tpu_vm, words):
    start = tpu_vm("start", "--slices=2 --topology=v5e:4x4")
    assert [command[5] for command in start] == ["b16-0", "b16-1"]
    for number, command in enumerate(start):
        _, script, action, *flags = remote(command)[: -len(words) - 1]
        assert flags == ["--slices=2", f"--slice={number}", "--coordinator=ADDRESS"]
        service = worker(action, *flags, "--dry_run", "--", *words)[-1]
        assert [word for word in service if "MEGASCALE" in word] == [
            "--setenv=MEGASCALE_NUM_SLICES=2",
            f"--setenv=MEGASCALE_SLICE_ID={number}",
            "--setenv=MEGASCALE_COORDINATOR_ADDRESS=ADDRESS",
            "--setenv=MEGASCALE_PORT=8081",
        ]
    assert not any("MEGASCALE" in w for w in worker("start", "--dry_run", "--", *words)[-1])


def test_a_worker_runs_the_supervisor_as_a_service_that_comes_back_unless_it_would_not_help(words):
    service = worker("start", "--dry_run", "--", *words)[-1]
    assert service[:3] == ["sudo", "systemd-run", "--quiet"] and "--unit=vit_jax" in service
    assert {
        "--property=Restart=on-failure",
        "--property=RestartPreventExitStatus=1 2",
        "--property=KillMode=mixed",
        "--property=RemainAfterExit=yes",
        "--property=LimitNOFILE=1048576",
    } <= set(service)
    program = service.index(f"{ROOT}/.venv/bin/python")
    assert service[program + 1] == "launch/local.py"
    assert service[service.index("--") + 1 :] == words


def test_a_worker_installs_what_was_sent_or_a_version_and_mounts_the_bucket():
    commands = worker("install", "--bucket=bkt", "--dry_run")
    assert commands[-1][0] == "gcsfuse" and commands[-1][-2:] == ["bkt", "/mnt/bkt"]
    assert commands[2][-2:] == ["--editable", ".[tpu,gcs]"]
    assert worker("install", "--version=0.2.0", "--dry_run")[-1][-1] == "vit_jax[tpu,gcs]==0.2.0"


def test_the_other_actions_on_a_slice(tpu_vm):
    tpus = ["gcloud", "compute", "tpus"]
    assert tpu_vm("delete") == [[*tpus, "tpu-vm", "delete", "b16", *WHERE, "--quiet"]]
    assert tpu_vm("delete", "--queued") == [
        [*tpus, "queued-resources", "delete", "b16", *WHERE, "--quiet", "--force"]
    ]
    (logs,) = tpu_vm("logs", "--worker=3")
    assert "journalctl" in remote(logs) and "--worker=3" in logs
    assert remote(tpu_vm("stop")[0]) == ["sudo", "systemctl", "stop", "vit_jax"]
    assert "describe" in tpu_vm("status")[0]


# Answers of gcloud, one after the other: states of the slice, then of the service on its workers.
GCLOUD = """
case "$*" in
  "storage buckets"*) echo '{"location": "EUROPE-WEST4"}'; exit ;;
  *describe*) file=states ;;
  *SubState*) file=services ;;
  *" $FAIL "*) exit 1 ;;
  *" $FAIL_ONCE "*) [ -e "$FOLDER/failed" ]; code=$?; touch "$FOLDER/failed"; exit $code ;;
  *) exit 0 ;;
esac
head -n 1 "$FOLDER/$file" | tr , '\\n'
sed -i 1d "$FOLDER/$file"
"""


@pytest.fixture
def keep(launch, stand_in, words, tmp_path, monkeypatch):
    """`keep(states, services)`: exit code, output, and what was done, of `keep` with a gcloud that gives these answers,
    and fails at its first `fail_once` and at every `fail`.
    """

    def keep(states: str, services: str, fail_once="-", fail="-", flags=()):
        calls = stand_in("gcloud", GCLOUD)
        (tmp_path / "states").write_text("\n".join(states.split(" ")) + "\n")
        (tmp_path / "services").write_text("\n".join(services.split(" ")) + "\n")
        monkeypatch.setenv("FAIL_ONCE", fail_once)
        monkeypatch.setenv("FAIL", fail)
        monkeypatch.chdir(ROOT)
        monkeypatch.setattr("launch.engines.tpu_vm._sent", lambda _: None)  # the archive is empty
        code, out, err = launch(
            "tpu_vm", *PLACE, "--topology=v5e:8x8", "--spot", "--every=0", *flags, "--", *words
        )
        done = [call.split() for call in calls.read_text().splitlines()]
        verbs = [c[4] for c in done if "describe" not in c and "SubState" not in " ".join(c)]
        return code, out + err, verbs

    return keep


MADE = ["create", "scp", "ssh", "ssh"]


def test_keep_makes_a_slice_starts_the_run_and_ends_when_it_is_done(keep):
    code, output, done = keep(" CREATING READY READY READY", "start,running running exited")
    assert (code, done) == (0, MADE) and "the run is done" in output


def test_keep_makes_a_slice_that_was_taken_away_anew_and_goes_on(keep):
    code, _, done = keep("READY PREEMPTED DELETING  READY", "running exited")
    assert (code, done) == (0, ["delete", *MADE])


@pytest.mark.parametrize("verb", ["create", "scp", "delete"])
def test_keep_tries_again_what_fails(keep, verb):
    code, _, done = keep("PREEMPTED PREEMPTED   READY READY", "dead exited", fail_once=verb)
    expected = {
        "create": ["delete", "delete", "create", *MADE, "scp", "ssh", "ssh"],
        "scp": ["delete", "delete", "create", "scp", *MADE, "scp", "ssh", "ssh"],
        "delete": ["delete", "delete", *MADE, *MADE, "scp", "ssh", "ssh"],
    }
    assert (code, done) == (0, expected[verb])


def test_keep_starts_the_run_again_where_a_worker_is_new_and_waits_where_none_answers(keep):
    code, _, done = keep("READY READY READY", " dead,running exited")
    assert (code, done) == (0, ["scp", "ssh", "ssh"])


def test_keep_ends_with_an_error_that_a_restart_will_not_cure(keep):
    code, output, done = keep("READY READY", "running failed")
    assert (code, done) == (1, ["ssh"]) and "will not cure" in output and "COSTS" in output


@pytest.mark.parametrize(("verb", "each"), [("scp", ["scp"]), ("ssh", ["scp", "ssh"])])
def test_keep_gives_up_when_a_slice_cannot_be_installed_and_says_that_it_costs(keep, verb, each):
    states = " " + " ".join(["READY"] * 9)
    code, output, done = keep(states, "dead " * 9, fail=verb, flags=["--max_attempts=3"])
    assert (code, done) == (1, ["create", *each * 3])
    assert "failed 3 times in a row" in output
    ending = "vit_jax launch tpu_vm delete --name=b16 --zone=europe-west4-b --project=p"
    assert f"COSTS until: {ending}" in output


def test_a_folder_that_cannot_be_sent_is_refused_before_there_is_a_slice(
    launch, stand_in, words, tmp_path, monkeypatch
):
    calls = stand_in("gcloud", GCLOUD)
    monkeypatch.chdir(tmp_path)
    code, _, err = launch("tpu_vm", *PLACE, "--topology=v5e:8x8", "--", *words)
    assert code == 2 and "call this there" in err and not calls.exists()


def test_keep_waits_for_capacity_as_long_as_it_takes_since_nothing_costs(keep):
    code, output, done = keep(
        "   READY READY", "exited", fail_once="create", flags=["--max_attempts=1"]
    )
    assert (code, done[:3]) == (0, ["create", "create", "scp"])
