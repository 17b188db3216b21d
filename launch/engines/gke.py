"""TPU slices of the GKE cluster that kubectl talks to, by JobSet, which must be installed there."""

import json
import re
from types import SimpleNamespace

from launch import checking, flags, google_cloud, shell
from vit_jax import __version__
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.devices import chips
from vit_jax.recipes import shipped

FLAGS = (
    "name", "topology", "slices", "chips_per_host", "image", "bucket", "spot", "service_account", "queue", "priority",
    "host_network", "node_path", "max_restarts", "grace", "ttl",
)  # fmt: skip
NEEDED = ("name", "topology")
DEFAULTS = {"service_account": "default"}
PROGRAM = "kubectl create"
ACTIONS = {"start": True}

# google.com/tpu of a node: 1 for a single chip, 8 for v5e and v6e on one host, else 4.
CHIPS_OF_HOST = {"1x1": (1,), "2x4": (4, 8)}
SPOT_GRACE = 15
BASE_IMAGE = "python:3.12-slim"


def check(action: str, options: SimpleNamespace) -> checking.Site:
    tpu, shape = chips.check_slice(options.topology)
    known = CHIPS_OF_HOST.get(shape, (4,))
    if options.chips_per_host not in known:
        choices = " or ".join(f"--chips_per_host={count}" for count in known)
        raise ConfigError(
            f"--chips_per_host={options.chips_per_host}: not a number of chips that hosts of {options.topology} "
            f"have; set {choices}"
        )
    # The longest name that is made of it, with the five random characters of a pod.
    pod = f"-slice-{options.slices - 1}-{hosts(options, shape) - 1}-xxxxx"
    flags.check_label("name", options.name, flags.MAX_LABEL - len(pod))
    for name in ("queue", "priority", "service_account"):
        if getattr(options, name):
            flags.check_label(name, getattr(options, name))
    flags.check_bucket(options.bucket)
    if not options.node_path.startswith("/"):
        raise ConfigError(f"--node_path={options.node_path}: must be an absolute path of the nodes")
    if options.spot and options.grace > SPOT_GRACE:
        shell.warn(
            f"--grace={options.grace} holds when the JobSet is deleted. When GKE takes spot nodes away it gives pods "
            f"{SPOT_GRACE} s, or what their node pool is configured for, up to 120 s: what is not saved by then "
            "continues from the last checkpoint"
        )
    if on_host_network(options):
        shell.warn(
            f"--slices={options.slices} puts pods on the nodes' network, where Workload Identity does not work: the "
            "run reads and writes gs:// as the service account of the node pool. The pool must be made with "
            "--scopes=cloud-platform, and the account needs roles/storage.objectUser on the bucket"
        )
    buckets = {f"/mnt/{options.bucket}": f"gs://{options.bucket}"} if options.bucket else {}
    return checking.Site(
        options.topology, options.slices, buckets=buckets, sent=bool(options.image)
    )


def on_host_network(options: SimpleNamespace) -> bool:
    return options.slices > 1 and options.host_network


def hosts(options: SimpleNamespace, shape: str) -> int:
    """Of a slice."""
    return chips.count_chips(shape) // options.chips_per_host


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    text = manifest(options, command, checked.local)
    if not options.image:
        shell.warn(
            f"without --image each pod installs vit_jax {__version__} from the package index at each start; an image "
            "has your files too, and starts sooner"
        )
    create = ["kubectl", "create", "--filename=-", *further]
    if options.dry_run:
        checking.require_checked(checked.unchecked, options)
        print(f"{text}# {shell.text(create)}  # with the manifest above", flush=True)
        return
    shell.require("kubectl")
    _check_cluster(options, command, checked)
    checking.require_checked(checked.unchecked, options)
    _remove_ended(options.name)
    shell.run(create, dry_run=False, text_in=text)


def manifest(options: SimpleNamespace, command: list[str], local: str) -> str:
    """The JobSet: `launch/gke/jobset.yaml`, filled in.

    Args:
      options: the engine's.
      command: of vit_jax.
      local: the folder of local checkpoints; '' without.

    Raises:
      ConfigError: a volume cannot be mounted at `local`.
    """
    if local and (not local.startswith("/") or local.rstrip("/") in ("", "/dev/shm", "/mnt")):
        raise ConfigError(
            f"config.checkpoint.local={local}: a folder of the node is mounted there; set an absolute path of its "
            "own, e.g. /local"
        )
    tpu, shape = chips.check_slice(options.topology)
    program = ["python", "-m", "vit_jax"]
    if not options.image:
        install = f"pip install --quiet --no-cache-dir 'vit_jax[tpu,gcs]=={__version__}'"
        program = ["sh", "-c", f'{install} && exec python -m vit_jax "$@"', "vit_jax"]
    conditions = {
        "bucket": options.bucket, "spot": options.spot, "queue": options.queue, "priority": options.priority,
        "several_slices": options.slices > 1, "host_network": on_host_network(options), "local": local,
    }  # fmt: skip
    values = vars(options) | {
        "image": options.image or BASE_IMAGE,
        "hosts": hosts(options, shape),
        "accelerator": tpu.gke,
        "shape": shape,
        "program": json.dumps(program),
        "command": json.dumps(command),
        "host_network": json.dumps(on_host_network(options)),
        "local": local,
    }
    return fill((shipped.launch_folder() / "gke/jobset.yaml").read_text(), conditions, values)


def fill(template: str, conditions: dict[str, object], values: dict[str, object]) -> str:
    """A template with a value for each @NAME@, without its head of comments, and without the blocks from '#if NAME' to
    '#end' whose condition is false.
    """
    lines, keep = [], True
    for line in template.splitlines():
        word = line.strip()
        if word.startswith("#if "):
            keep = bool(conditions[word.removeprefix("#if ")])
        elif word == "#end":
            keep = True
        elif keep and not line.startswith("#"):
            lines.append(line)
    return re.sub(r"@(\w+)@", lambda match: str(values[match[1]]), "\n".join(lines)) + "\n"


def _check_cluster(options: SimpleNamespace, command: list[str], checked: checking.Checked) -> None:
    """Looks at the cluster of kubectl's context and at the buckets, where gcloud can; adds what it cannot find out."""
    buckets = google_cloud.buckets_in(command, options.bucket)
    context = shell.ask(["kubectl", "config", "current-context"]) or ""
    match = re.fullmatch(r"gke_(.+?)_(.+?)_(.+)", context)
    if match is None:
        if on_host_network(options):
            checked.unchecked.append(
                f"the scopes of the node pool: kubectl's context {context!r} does not name a cluster of GKE"
            )
        return
    project, location, cluster = match.groups()
    google_cloud.warn_of_regions(buckets, google_cloud.region_of(location), checked)
    if on_host_network(options):
        _, shape = chips.check_slice(options.topology)
        checked.unchecked += google_cloud.check_writer(
            cluster, location, project, shape, google_cloud.written_bucket(command)
        )


def _remove_ended(name: str) -> None:
    """Deletes a JobSet of the same name that has ended: to create it again would be refused, and to apply it would run
    nothing.

    Raises:
      UserError: it has not ended.
    """
    state = shell.ask(
        ["kubectl", "get", "jobset", name, "--ignore-not-found",
         "--output=jsonpath={.metadata.name}:{.status.terminalState}"]
    )  # fmt: skip
    if not state:
        return
    if state == f"{name}:":
        raise UserError(
            f"jobset {name} has not ended; 'kubectl delete jobset {name}' saves and ends it, or choose another --name"
        )
    shell.run(["kubectl", "delete", "jobset", name, "--wait"], dry_run=False)
