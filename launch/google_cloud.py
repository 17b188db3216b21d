"""What of Google Cloud can be asked for before chips are paid: where a bucket is, and whether the account under which
pods will run may write to it.
"""

import json
import re

from launch import local, shell
from launch.checking import Checked
from vit_jax.base.errors import ConfigError

# Scopes of node pools with which objects can be written, without https://www.googleapis.com/auth/.
WRITING = ("cloud-platform", "devstorage.full_control", "devstorage.read_write")
# Roles with which checkpoints can be written, read and deleted.
ROLES = ("roles/storage.objectUser", "roles/storage.objectAdmin", "roles/storage.admin")
# Regions of the predefined pairs (cloud.google.com/storage/docs/locations, 2026).
PAIRS = {
    "NAM4": ("us-central1", "us-east1"),
    "EUR4": ("europe-north1", "europe-west4"),
    "EUR5": ("europe-west1", "europe-west2"),
    "EUR7": ("europe-west2", "europe-west3"),
    "EUR8": ("europe-west3", "europe-west6"),
    "ASIA1": ("asia-northeast1", "asia-northeast2"),
}


def region_of(zone: str) -> str:
    """The region of a zone or of a region: europe-west4 of europe-west4-b."""
    match = re.match(r"[a-z]+-[a-z]+\d+", zone)
    return match[0] if match else ""


def buckets_in(command: list[str], bucket: str = "") -> list[str]:
    """The buckets of Cloud Storage that a command names, and the one that is mounted."""
    named = re.findall(r"gs://([-_.a-z0-9]+)", " ".join(command))
    return list(dict.fromkeys([*([bucket] if bucket else []), *named]))


def written_bucket(command: list[str]) -> str:
    """The bucket of the workdir; '' without."""
    return next(iter(buckets_in([f"{local.workdir_of(command)}/"])), "")


def warn_of_regions(buckets: list[str], region: str, checked: Checked) -> None:
    """Warns of buckets that are not in the region of the chips, with what a run reads from there."""
    for bucket in buckets if region else ():
        words = ["gcloud", "storage", "buckets", "describe", f"gs://{bucket}", "--format=json"]
        answer = shell.ask(words)
        if answer is None:
            checked.unchecked.append(f"whether gs://{bucket} is in {region}, where the chips are")
            continue
        bucket_info = json.loads(answer)
        location = bucket_info["location"].upper()
        regions = bucket_info.get("data_locations") or PAIRS.get(location, (location,))
        if region.upper() not in map(str.upper, regions):
            amount = f", {checked.reads / 1e12:,.1f} TB in all" if checked.reads else ""
            shell.warn(
                f"gs://{bucket} is in {location}, the chips in {region}: each image is read across regions{amount}, "
                "which is billed by the GB and slower; copy the data to a bucket of that region, or set "
                "--config.data.cache, which reads it once for each host"
            )


def check_writer(cluster: str, location: str, project: str, shape: str, bucket: str) -> list[str]:
    """Checks that the account of a slice's node pools, under which pods on the nodes' network act, may write to a
    bucket; gives what could not be found out.

    Args:
      cluster, location, project: of GKE.
      shape: of the slice.
      bucket: to be written; '' without.

    Raises:
      ConfigError: the scopes of a node pool forbid it.
    """
    pools = shell.ask(
        ["gcloud", "container", "node-pools", "list", f"--cluster={cluster}", f"--location={location}",
         f"--project={project}", "--format=json"]
    )  # fmt: skip
    if pools is None:
        return [f"the scopes of the node pools of {cluster}, which gcloud could not list"]
    fitting = [
        pool for pool in json.loads(pools)
        if pool.get("placementPolicy", {}).get("tpuTopology") == shape
    ]  # fmt: skip
    if not fitting:
        return [f"the scopes of the node pool: {cluster} has none with topology {shape} yet"]
    unchecked = []
    for pool in fitting:
        scopes = [scope.rpartition("/")[2] for scope in pool["config"].get("oauthScopes", [])]
        if not set(WRITING) & set(scopes):
            raise ConfigError(
                f"node pool {pool['name']} has the scopes {', '.join(scopes) or 'none'}: pods that use the nodes' "
                "network act under its service account, and the first save would end with 403. Make the pool "
                "again with --scopes=cloud-platform, or set --nohost_network, which keeps Workload Identity"
            )
        account = pool["config"].get("serviceAccount", "default")
        unchecked += _check_role(account, bucket) if bucket else []
    return list(dict.fromkeys(unchecked))


def _check_role(account: str, bucket: str) -> list[str]:
    """Whether an account has a role on a bucket with which it can write."""
    policy = shell.ask(
        ["gcloud", "storage", "buckets", "get-iam-policy", f"gs://{bucket}", "--format=json"]
    )
    if policy is None:
        return [f"whether {account} may write to gs://{bucket}, whose policy gcloud could not read"]
    # The default account is that of the project's number.
    ending = "-compute@developer.gserviceaccount.com" if account == "default" else account
    members = [
        member
        for binding in json.loads(policy).get("bindings", [])
        if binding["role"] in ROLES
        for member in binding["members"]
    ]
    if any(member.startswith("serviceAccount:") and member.endswith(ending) for member in members):
        return []
    return [
        f"whether {account}, the node pool's service account, may write to gs://{bucket}: it has no role on the bucket "
        f"itself. Perhaps its project grants one; if not: gcloud storage buckets add-iam-policy-binding gs://{bucket} "
        f"--member=serviceAccount:{account} --role={ROLES[0]}"
    ]
