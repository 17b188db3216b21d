"""What launch/gke/jobset.sh asks of a cluster, held against the schemas of Kubernetes and JobSet."""

import json

import jsonschema
import kubernetes_validate
import pytest
import yaml

from tests.launch.test_scripts import ROOT, WORDS, run
from vit_jax.devices import chips

# The CRD's schema, from its project; only where the working copy has it beside it.
JOBSET_SCHEMA = ROOT.parent / "shared/data/k8s/jobset_v1alpha2.schema.json"
NEEDED = ("--name=b16", "--image=IMAGE", "--bucket=bkt")
ALL_FLAGS = ("--slices=2", "--spot", "--queue=tpus", "--max_restarts=7", "--grace=30")


def jobset(*flags: str) -> dict:
    """The manifest that these flags make."""
    result = run("gke/jobset.sh", *NEEDED, *flags, "--dry_run", "--", *WORDS)
    assert result.returncode == 0, result.stderr
    assert "kubectl apply" in result.stdout
    return yaml.safe_load(result.stdout)


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
    manifest = jobset(f"--topology={topology}", "--slices=2", "--spot")
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
        {"name": "bucket", "mountPath": "/mnt/bkt", "readOnly": True}
    ]
    assert pod["volumes"][0]["csi"]["volumeAttributes"]["bucketName"] == "bkt"
    assert "@" not in str(manifest)
    one = pod_of(jobset(f"--topology={topology}"))
    assert "cloud.google.com/gke-spot" not in one["nodeSelector"]


def test_a_jobset_starts_again_what_ends_with_42_or_by_a_signal_but_not_errors():
    spec = jobset("--topology=v5e:8x8", "--max_restarts=7")["spec"]
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


@pytest.mark.parametrize("flags", [(), ALL_FLAGS], ids=["few flags", "all flags"])
def test_a_jobset_has_the_fields_that_its_schema_has(flags):
    if not JOBSET_SCHEMA.exists():
        pytest.skip(f"{JOBSET_SCHEMA} is not here")
    schema = forbid_unknown(json.loads(JOBSET_SCHEMA.read_text()))
    manifest = jobset("--topology=v5e:8x8", *flags)
    jsonschema.validate(manifest, schema)
    manifest["spec"]["replicatedJobs"][0]["replica"] = 2
    with pytest.raises(jsonschema.ValidationError, match="replica"):
        jsonschema.validate(manifest, schema)


@pytest.mark.parametrize("flags", [(), ALL_FLAGS], ids=["few flags", "all flags"])
def test_jobs_and_pods_of_a_jobset_are_valid(flags):
    template = jobset("--topology=v5e:8x8", *flags)["spec"]["replicatedJobs"][0]["template"]
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "b16"}} | template
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "b16"}}
    for document in (job, pod | {"spec": template["spec"]["template"]["spec"]}):
        kubernetes_validate.validate(document, kubernetes_validate.latest_version(), strict=True)


def test_pods_of_several_slices_get_all_that_slices_know_of_each_other():
    (container,) = pod_of(jobset("--topology=v5e:8x8", "--slices=2"))["containers"]
    job_index = "metadata.annotations['jobset.sigs.k8s.io/job-index']"
    assert container["env"] == [
        {"name": "JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": job_index}}},
        {"name": "MEGASCALE_SLICE_ID", "value": "$(JOB_INDEX)"},
        {"name": "MEGASCALE_NUM_SLICES", "value": "2"},
        {"name": "MEGASCALE_COORDINATOR_ADDRESS", "value": "b16-slice-0-0.b16"},
        {"name": "MEGASCALE_PORT", "value": "8081"},
    ]
    assert "env" not in pod_of(jobset("--topology=v5e:8x8"))["containers"][0]


def test_spot_nodes_give_less_grace_than_asked_for_and_it_says_so():
    flags = ("--topology=v5e:8x8", "--dry_run", "--spot")
    result = run("gke/jobset.sh", *NEEDED, *flags, "--", *WORDS)
    assert result.returncode == 0 and "--grace=120" in result.stderr and "15 s" in result.stderr
    quiet = run("gke/jobset.sh", *NEEDED, *flags, "--grace=15", "--", *WORDS)
    assert quiet.returncode == 0 and not quiet.stderr
    assert pod_of(yaml.safe_load(quiet.stdout))["terminationGracePeriodSeconds"] == 15


def test_a_jobset_waits_in_a_queue_of_kueue():
    label = {"kueue.x-k8s.io/queue-name": "tpus"}
    assert jobset("--topology=v5e:8x8", "--queue=tpus")["metadata"]["labels"] == label
    assert "labels" not in jobset("--topology=v5e:8x8")["metadata"]


def test_the_queue_of_the_example_covers_what_a_jobset_asks_for():
    documents = [*yaml.safe_load_all((ROOT / "launch/gke/kueue.yaml").read_text())]
    assert {d["apiVersion"] for d in documents} == {"kueue.x-k8s.io/v1beta2"}
    flavor, cluster_queue, queue = documents
    kinds = ["ResourceFlavor", "ClusterQueue", "LocalQueue"]
    assert [document["kind"] for document in documents] == kinds
    (group,) = cluster_queue["spec"]["resourceGroups"]
    pod = pod_of(jobset("--topology=v5e:8x8", f"--queue={queue['metadata']['name']}"))
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
    assert pod_of(jobset(f"--topology={kind}:{shape}"))["nodeSelector"] == {
        "cloud.google.com/gke-tpu-accelerator": tpu.gke,
        "cloud.google.com/gke-tpu-topology": shape,
    }


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--topology=v9:2x2",), "kinds are v4, v5e"),
        (("--topology=v5e",), "no slice ''"),
        (("--topology=v5e:3x3",), "no slice '3x3'; it has: 1x1, 2x2"),
        (("--topology=v5e:1x1",), "--chips=1"),
        (("--topology=v5e:8x8", "--chips=8"), "--chips=8"),
        (("--topology=v5e:8x8", "--chips=four"), "--chips=four"),
        (("--topology=v5e:8x8", "--slices=two"), "--slices=two"),
        (("--topology=v5e:8x8", "--grace=-1"), "--grace=-1"),
        (("--topology=v5e:8x8", "--max_restarts="), "--max_restarts="),
        (("--topology=v5e:8x8", "--name=B_16"), "--name=B_16"),
        (("--topology=v5e:8x8", "--name=16b"), "--name=16b"),
        (("--topology=v5e:8x8", f"--name={'b' * 47}"), "must have 46 or less"),
        (("--topology=v5e:8x8", "--queue=My_Queue"), "--queue=My_Queue"),
        (("--topology=v5e:8x8", "--bucket=gs://bkt"), "without gs://"),
        (("--topology=v5e:8x8", "--image="), "--image=… is needed"),
    ],
)
def test_what_no_cluster_would_take_is_refused_in_one_sentence(flags, words):
    result = run("gke/jobset.sh", *NEEDED, *flags, "--dry_run", "--", "train")
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert not result.stdout and "line " not in result.stderr


def test_the_longest_name_still_makes_names_that_dns_takes():
    manifest = jobset("--topology=v5e:8x8", "--slices=11", f"--name={'b' * 45}")
    assert len(f"{manifest['metadata']['name']}-slice-10-15-xxxxx") == 63
