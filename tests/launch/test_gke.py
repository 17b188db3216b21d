"""What `vit_jax launch gke` asks of a cluster, held against the schemas of Kubernetes and JobSet and against a golden
file; and what it looks at before it asks.
"""

import json
from types import SimpleNamespace

import jsonschema
import kubernetes_validate
import pytest
import yaml

from launch import flags
from launch.engines import gke
from tests.launch.test_scripts import ROOT
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips

# The CRD's schema, from its project; only where the working copy has it beside it.
JOBSET_SCHEMA = ROOT.parent / "shared/data/k8s/jobset_v1alpha2.schema.json"
GOLDEN = ROOT / "tests/launch/golden/jobset.yaml"
WORDS = [
    "train",
    "--config=vit_i21k:B/16,light2",
    "--workdir=gs://bkt/b16",
    """--config.data.name=a 'quoted' "name" & more""",
]
ALL_FLAGS = {
    "slices": 2, "spot": True, "queue": "tpus", "priority": "high", "max_restarts": 7, "grace": 30,
}  # fmt: skip


def options(topology: str = "v5e:8x8", **given) -> SimpleNamespace:
    """The engine's options, checked."""
    values = {name: gke.DEFAULTS.get(name, flags.FLAGS[name].default) for name in gke.FLAGS}
    values |= {"name": "b16", "image": "IMAGE", "bucket": "bkt", "topology": topology} | given
    options = SimpleNamespace(**values)
    flags.check_values(options, gke.NEEDED)
    gke.check("start", options)
    return options


def jobset(topology: str = "v5e:8x8", local: str = "", **given) -> dict:
    """The manifest that these options make."""
    return yaml.safe_load(gke.manifest(options(topology, **given), WORDS, local))


def pod_of(manifest: dict) -> dict:
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(
    ("topology", "accelerator", "shape", "hosts"),
    [
        ("v4:4x4x4", "tpu-v4-podslice", "4x4x4", 16),
        ("v5e:16x16", "tpu-v5-lite-podslice", "16x16", 64),
        ("v5p:4x4x8", "tpu-v5p-slice", "4x4x8", 32),
        ("v6e:8x8", "tpu-v6e-slice", "8x8", 16),
        ("tpu7x:2x2x1", "tpu7x", "2x2x1", 1),
    ],
)
def test_a_jobset_asks_for_the_slices_and_their_hosts(topology, accelerator, shape, hosts):
    manifest = jobset(topology, slices=2, spot=True)
    (slices,) = manifest["spec"]["replicatedJobs"]
    job = slices["template"]["spec"]
    pod = pod_of(manifest)
    assert (slices["replicas"], job["parallelism"], job["completions"]) == (2, hosts, hosts)
    assert pod["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": accelerator,
        "cloud.google.com/gke-tpu-topology": shape,
        "cloud.google.com/gke-spot": "true",
    }
    (container,) = pod["containers"]
    assert container["resources"]["limits"] == {"google.com/tpu": 4}
    assert container["command"] + container["args"] == ["python", "-m", "vit_jax", *WORDS]
    assert container["volumeMounts"] == [
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "bucket", "mountPath": "/mnt/bkt", "readOnly": True},
    ]
    assert pod["volumes"][1]["csi"]["volumeAttributes"]["bucketName"] == "bkt"
    assert (
        "@" not in str(manifest)
        and "cloud.google.com/gke-spot" not in pod_of(jobset(topology))["nodeSelector"]
    )


def test_the_golden_manifest_is_what_was_read_by_eye():
    more = {"ttl": 86400, "service_account": "trainer"}
    text = gke.manifest(options("v5e:8x8", **ALL_FLAGS, **more), WORDS, "/local")
    assert text == GOLDEN.read_text()


def test_local_checkpoints_are_kept_on_the_node_where_the_next_pods_find_them():
    pod = pod_of(jobset(local="/local"))
    assert {"name": "local", "mountPath": "/local"} in pod["containers"][0]["volumeMounts"]
    path = "/mnt/stateful_partition/vit_jax/b16"
    volume = {"name": "local", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
    assert volume in pod["volumes"]
    in_memory = pod_of(jobset(local="/local", node_path="/dev/shm/vit_jax"))
    assert in_memory["volumes"][-1]["hostPath"]["path"] == "/dev/shm/vit_jax/b16"
    assert pod["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory"}}
    for wrong in ("/dev/shm", "local", "/"):
        with pytest.raises(ConfigError, match="checkpoint.local"):
            jobset(local=wrong)


def test_without_an_image_each_pod_installs_this_version_and_runs_the_words_as_given():
    (container,) = pod_of(jobset(image=""))["containers"]
    assert container["image"] == "python:3.12-slim" and container["args"] == WORDS
    shell, flag, line, name = container["command"]
    assert (shell, flag, name) == ("sh", "-c", "vit_jax") and "'vit_jax[tpu,gcs]==" in line
    assert line.endswith('&& exec python -m vit_jax "$@"')


def test_a_jobset_starts_again_what_ends_with_42_or_by_a_signal_but_not_errors():
    spec = jobset(max_restarts=7)["spec"]
    assert spec["ttlSecondsAfterFinished"] == 7 * 24 * 3600
    assert spec["failurePolicy"] == {
        "maxRestarts": 7,
        "rules": [
            {
                "name": "error",
                "action": "FailJobSet",
                "onJobFailureReasons": ["PodFailurePolicy"],
            }
        ],
    }
    job = spec["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0 and job["template"]["spec"]["restartPolicy"] == "Never"
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert rule["onExitCodes"] == {"containerName": "train", "operator": "In", "values": [1, 2]}
    assert {42, *range(127, 256)}.isdisjoint(rule["onExitCodes"]["values"])


def forbid_unknown(schema: dict) -> dict:
    """The schema, with fields that it does not name as errors: a cluster drops them silently."""
    if isinstance(schema, list):
        return [forbid_unknown(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    strict = {name: forbid_unknown(value) for name, value in schema.items()}
    if "properties" in schema and schema.get("type") == "object":
        strict.setdefault("additionalProperties", False)
    return strict


@pytest.mark.parametrize("given", [{}, ALL_FLAGS | {"local": "/local"}], ids=["few", "all"])
def test_a_jobset_has_the_fields_that_its_schema_has(given):
    if not JOBSET_SCHEMA.exists():
        pytest.skip(f"{JOBSET_SCHEMA} is not here")
    schema = forbid_unknown(json.loads(JOBSET_SCHEMA.read_text()))
    manifest = jobset(**given)
    jsonschema.validate(manifest, schema)
    manifest["spec"]["replicatedJobs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(manifest, schema)


@pytest.mark.parametrize("given", [{}, ALL_FLAGS | {"local": "/local"}], ids=["few", "all"])
def test_jobs_and_pods_of_a_jobset_are_valid(given):
    template = jobset(**given)["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "b16"}} | template
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b16"}}
    for document in (job, pod | {"spec": template["spec"]["template"]["spec"]}):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_pods_know_how_often_they_were_started_again():
    (container,) = pod_of(jobset())["containers"]
    attempt = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
    assert container["env"] == [
        {"name": "VIT_JAX_RESTARTS", "valueFrom": {"fieldRef": {"fieldPath": attempt}}}
    ]


def test_pods_of_several_slices_get_all_that_slices_know_of_each_other():
    (alone,) = pod_of(jobset())["containers"]
    (container,) = pod_of(jobset(slices=2))["containers"]
    job_index = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    assert container["env"] == [
        *alone["env"],
        {"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": job_index}}},
        {"name": "MEGASCALE_SLICE_ID", "value": "$(JOB_INDEX)"},
        {"name": "MEGASCALE_NUM_SLICES", "value": "2"},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": "b16-slice-0-0.b16"},
        {"name": "MEGASCALE_PORT", "value": "8081"},
    ]


def test_the_network_of_nodes_is_for_several_slices_and_says_what_it_costs(capsys):
    both = pod_of(jobset(slices=2))
    assert both["hostNetwork"] and both["dnsPolicy"] == "ClusterFirstWithHostNet"
    assert both["volumes"][1]["csi"]["volumeAttributes"]["hostNetworkPodKSA"] == "true"
    assert "--scopes=cloud-platform" in capsys.readouterr().err
    for pod in (pod_of(jobset()), pod_of(jobset(slices=2, host_network=False))):
        assert "hostNetwork" not in pod and "dnsPolicy" not in pod
        assert pod["volumes"][1]["csi"]["volumeAttributes"]["hostNetworkPodKSA"] == "false"
    assert not capsys.readouterr().err


def test_spot_nodes_give_less_grace_than_asked_for_and_it_says_so(capsys):
    jobset(spot=True)
    warning = capsys.readouterr().err
    assert "--grace=120" in warning and "15 s" in warning
    assert pod_of(jobset(spot=True, grace=15))["terminationGracePeriodSeconds"] == 15
    assert not capsys.readouterr().err


def test_a_jobset_waits_in_a_queue_of_kueue():
    label = {"kueue.x-k8s.io/queue-name": "tpus"}
    assert jobset(queue="tpus")["metadata"]["labels"] == label
    assert "labels" not in jobset()["metadata"]


def test_the_queue_of_the_example_covers_what_a_jobset_asks_for():
    documents = [*yaml.safe_load_all((ROOT / "launch/gke/kueue.yaml").read_text())]
    assert {d["apiVersion"] for d in documents} == {"kueue.x-k8s.io/v1beta2"}
    flavor, cluster_queue, queue = documents
    kinds = ["ResourceFlavor", "ClusterQueue", "LocalQueue"]
    assert [document["kind"] for document in documents] == kinds
    (group,) = cluster_queue["spec"]["resourceGroups"]
    pod = pod_of(jobset(queue=queue["metadata"]["name"]))
    assert set(pod["containers"][0]["resources"]["limits"]) == set(group["coveredResources"])
    (only,) = group["flavors"]
    assert only["name"] == flavor["metadata"]["name"]
    assert [r["name"] for r in only["resources"]] == group["coveredResources"]
    labels = flavor["spec"]["nodeLabels"]
    assert labels.items() <= pod["nodeSelector"].items()
    assert queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]


@pytest.mark.parametrize(("kind", "tpu"), chips.TPUS.items())
def test_every_slice_that_plan_knows_can_be_asked_for(kind, tpu):
    shape = tpu.shapes()[-1]
    assert pod_of(jobset(f"{kind}:{shape}", chips_per_host=gke.CHIPS_OF_HOST.get(shape, (4,))[0]))[
        "nodeSelector"
    ] == {
        "cloud.google.com/gke-tpu-accelerator": tpu.gke,
        "cloud.google.com/gke-tpu-topology": shape,
    }


NEEDED = {"--name": "b16", "--topology": "v5e:8x8", "--image": "IMAGE", "--bucket": "bkt"}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("--topology=v9:2x2", "kinds are v4, v5e"),
        ("--topology=v5e", "no slice ''"),
        ("--topology=v5e:3x3", "no slice '3x3'; it has: 1x1, 2x2"),
        ("--topology=v5e:1x1", "--chips_per_host=1"),
        ("--topology=", "--topology=… is missing"),
        ("--chips_per_host=8", "--chips_per_host=8"),
        ("--chips_per_host=four", "--chips_per_host=four"),
        ("--chips=4", "this flag is now --chips_per_host"),
        ("--slices=two", "--slices=two"),
        ("--slices=0", "--slices=0: must be 1 or more"),
        ("--grace=-1", "--grace=-1"),
        ("--max_restarts=", "--max_restarts="),
        ("--name=B_16", "--name=B_16"),
        ("--name=16b", "--name=16b"),
        (f"--name={'b' * 47}", "must have 46 or less"),
        ("--queue=My_Queue", "--queue=My_Queue"),
        ("--priority=High!", "--priority=High!"),
        ("--bucket=gs://bkt", "without gs://"),
        ("--node_path=local", "--node_path=local"),
        ("--typology=v5e:8x8", "did you mean '--topology'"),
    ],
)
def test_what_no_cluster_would_take_is_refused_in_one_sentence(launch, given, words):
    name, _, value = given.partition("=")
    arguments = [f"{name}={value}" for name, value in (NEEDED | {name: value}).items()]
    code, out, err = launch("gke", *arguments, "--dry_run", "--", "train")
    assert code == 2 and words in err.splitlines()[-1], err
    assert not out


def test_the_longest_name_still_makes_names_that_dns_takes():
    manifest = jobset(slices=11, name="b" * 45)
    assert len(f"{manifest['metadata']['name']}-slice-10-15-xxxxx") == 63


# A cluster of GKE, whose node pool has the scopes in $SCOPES, and a bucket in $LOCATION.
GCLOUD = """
case "$*" in
  "container node-pools list --cluster=c --location=us-east5 --project=p --format=json")
    echo '[{"name": "tpus", "placementPolicy": {"tpuTopology": "4x4"}, "config": {"serviceAccount": "n@p.iam",
      "oauthScopes": ["https://www.googleapis.com/auth/'"$SCOPES"'"]}}]' ;;
  *get-iam-policy*)
    echo '{"bindings": [{"role": "roles/storage.objectUser", "members": ["serviceAccount:'"$MEMBER"'"]}]}' ;;
  *describe*) echo '{"location": "'"$LOCATION"'"}' ;;
  *) exit 1 ;;
esac
"""
KUBECTL = """
case "$*" in
  "config current-context") echo gke_p_us-east5_c ;;
  "get jobset"*) echo "$FOUND" ;;
  "create --filename=-"*) cat > "$FOLDER/created" ;;
esac
"""


@pytest.fixture
def cluster(stand_in, monkeypatch, launch, bucket, tmp_path):
    """`cluster(scopes, found)`: exit code, errors and calls of kubectl, of a start on two slices of such a cluster."""

    def start(scopes="cloud-platform", found="", location="US-EAST5", member="n@p.iam", flags=()):
        stand_in("gcloud", GCLOUD)
        calls = stand_in("kubectl", KUBECTL)
        values = {"SCOPES": scopes, "FOUND": found, "LOCATION": location, "MEMBER": member}
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        words = ["train", "--config=digits", f"--workdir={bucket}/b16"]
        wanted = ("--name=b16", "--topology=v5e:4x4", "--slices=2", "--image=I", *flags)
        code, _, err = launch("gke", *wanted, "--", *words, "--", "--namespace=vision")
        lines = calls.read_text().splitlines()
        return code, err, [line for line in lines if line.startswith("kubectl")]

    return start


def test_a_run_is_created_with_further_flags_of_kubectl(cluster, tmp_path):
    code, err, calls = cluster()
    assert code == 0, err
    assert calls[-1] == "kubectl create --filename=- --namespace=vision"
    assert yaml.safe_load((tmp_path / "created").read_text())["metadata"]["name"] == "b16"


def test_a_run_of_a_name_that_has_ended_replaces_it_and_one_that_has_not_is_refused(cluster):
    code, _, calls = cluster(found="b16:Completed")
    assert code == 0 and calls[-2:] == [
        "kubectl delete jobset b16 --wait", "kubectl create --filename=- --namespace=vision",
    ]  # fmt: skip
    code, err, calls = cluster(found="b16:")
    assert code == 1 and "has not ended" in err and "get jobset" in calls[-1]


def test_scopes_and_roles_of_the_node_pool_are_looked_at_before_chips_are_paid(cluster):
    code, err, calls = cluster(scopes="devstorage.read_only")
    assert code == 2 and "node pool tpus has the scopes devstorage.read_only" in err
    assert not any("create" in call for call in calls)
    assert cluster(scopes="devstorage.read_only", flags=["--nohost_network"])[0] == 0
    code, err, calls = cluster(member="somebody@else")
    assert code == 2 and "add-iam-policy-binding" in err and "--unchecked" in err
    code, err, calls = cluster(member="somebody@else", flags=["--unchecked"])
    assert code == 0 and "not checked" in err and "create" in calls[-1]


def test_a_bucket_of_another_region_is_warned_of_with_what_is_read_from_it(cluster):
    # 899 steps of 64 images of about 110 kB.
    code, err, _ = cluster(location="EUROPE-WEST4")
    assert code == 0 and "is in EUROPE-WEST4, the chips in us-east5" in err and "0.0 TB" in err
    assert "the chips in" not in cluster(location="US-EAST5")[1]
