"""A cluster that xpk has made (pip install xpk)."""

from types import SimpleNamespace

from launch import checking, flags, google_cloud, shell
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips

FLAGS = (
    "cluster", "name", "topology", "slices", "image", "storage", "project", "zone", "priority", "max_restarts", "grace",
    "ttl",
)  # fmt: skip
NEEDED = ("cluster", "name", "topology", "image")
DEFAULTS: dict[str, object] = {}
PROGRAM = "xpk workload create"
ACTIONS = {"start": True}

LONGEST_NAME = 40  # xpk refuses longer ones
PRIORITIES = ("very-low", "low", "medium", "high", "very-high")


def check(action: str, options: SimpleNamespace) -> checking.Site:
    flags.check_label("name", options.name, LONGEST_NAME)
    tpu_type(options.topology)
    if options.priority and options.priority not in PRIORITIES:
        raise ConfigError(f"--priority={options.priority}: xpk has {', '.join(PRIORITIES)}")
    shell.warn(
        "xpk puts pods on the nodes' network, where Workload Identity does not work: the run reads and writes gs:// as "
        "the service account of the node pool, which needs the scope cloud-platform, and roles/storage.objectUser on "
        "the bucket"
    )
    return checking.Site(options.topology, options.slices)


def tpu_type(topology: str) -> str:
    """A slice as xpk names it, by its number of cores: v5p-256 of v5p:4x4x8.

    Raises:
      ConfigError: xpk gives another shape for this number.
    """
    tpu, shape = chips.check_slice(topology)
    count = chips.count_chips(shape)
    compact = min(
        (other for other in tpu.shapes() if chips.count_chips(other) == count),
        key=lambda other: sum(map(int, other.split("x"))),
    )
    kind, cores = (tpu.vm, tpu.vm_cores_per_chip) if tpu.vm else (topology.partition(":")[0], 2)
    if shape != compact:
        raise ConfigError(
            f"--topology={topology}: xpk knows slices by their number of cores, {kind}-{count * cores}, which is "
            f"{compact}; use 'vit_jax launch gke' for {shape}"
        )
    return f"{kind}-{count * cores}"


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    words = [
        "xpk", "workload", "create", f"--cluster={options.cluster}", f"--workload={options.name}",
        f"--tpu-type={tpu_type(options.topology)}", f"--num-slices={options.slices}", f"--docker-image={options.image}",
        f"--max-restarts={options.max_restarts}", f"--termination-grace-period-seconds={options.grace}",
        f"--ttl-seconds-after-finished={options.ttl}",
    ]  # fmt: skip
    for name in ("priority", "storage", "project", "zone"):
        if getattr(options, name):
            words.append(f"--{name}={getattr(options, name)}")
    if checked.local:  # in memory, by the driver of a cluster made with --enable-mtc
        words += ["--mtc-enabled", f"--ramdisk-directory={checked.local}"]
    words += [*further, f"--command=python -m vit_jax {shell.text(command)}"]
    if not options.dry_run:
        _check_cluster(options, command, checked)
    checking.require_checked(checked.unchecked, options)
    shell.run(words, dry_run=options.dry_run)


def _check_cluster(options: SimpleNamespace, command: list[str], checked: checking.Checked) -> None:
    """Looks at the node pools and the buckets, as for GKE."""
    zone = options.zone or shell.ask(["gcloud", "config", "get-value", "compute/zone"]) or ""
    project = options.project or shell.ask(["gcloud", "config", "get-value", "project"]) or ""
    region = google_cloud.region_of(zone)
    google_cloud.warn_of_regions(google_cloud.buckets_in(command), region, checked)
    _, shape = chips.check_slice(options.topology)
    checked.unchecked += google_cloud.check_writer(
        options.cluster, region, project, shape, google_cloud.written_bucket(command)
    )
