"""A TPU slice (or several) of TPU VMs, from nothing to a running training, through pre-emptions, to nothing.

keep      create, install, start; then looks every minute: a slice that was taken away is created again and the run
          continues from its last checkpoint; ends when the run does, or when the software cannot be installed
create    requests the slice and waits for it
install   copies this folder to all workers, installs vit_jax, mounts --bucket
start     starts vit_jax on all workers, as a systemd service that starts again what ends too early
status    of the slice and of the service on each worker
logs      follows the output of one worker
stop      SIGTERM: the run saves and ends; start continues
delete    the slice; the bucket stays
"""

import tarfile
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from launch import checking, flags, google_cloud, shell
from vit_jax import __version__
from vit_jax.base import install
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.devices import chips
from vit_jax.recipes import shipped

FLAGS = (
    "name", "zone", "project", "topology", "slices", "version", "spot", "reserved", "queued", "bucket", "network",
    "subnetwork", "internal_ips", "tunnel_through_iap", "service_account", "worker", "slice", "every", "max_attempts",
)  # fmt: skip
NEEDED = ("name", "zone")
DEFAULTS: dict[str, object] = {}
PROGRAM = "gcloud compute tpus … create"
ACTIONS = {
    "keep": True, "create": False, "install": False, "start": True, "status": False, "logs": False, "stop": False,
    "delete": False,
}  # fmt: skip

GCLOUD = ("gcloud", "compute", "tpus")
NOT_SENT = {".git", ".venv", "runs", "__pycache__", ".pytest_cache", "node_modules"}
LONGEST_PAUSE = 600


def check(action: str, options: SimpleNamespace) -> checking.Site:
    longest = flags.MAX_LABEL - (len(f"-{options.slices - 1}") if options.slices > 1 else 0)
    flags.check_label("name", options.name, longest)
    if options.slice >= options.slices:
        raise ConfigError(
            f"--slice={options.slice}: there are {options.slices}, which count from 0"
        )
    flags.check_bucket(options.bucket)
    if not google_cloud.region_of(options.zone):
        raise ConfigError(
            f"--zone={options.zone}: must be a zone of Google Cloud, e.g. europe-west4-b"
        )
    if options.topology:
        chips.check_vm_slice(options.topology)
    elif action == "create" or ACTIONS[action]:
        raise ConfigError(f"--topology=… is missing: {flags.FLAGS['topology'].help}")
    if options.spot and options.reserved:
        raise ConfigError("--spot and --reserved: a slice is one or the other")
    buckets = {f"/mnt/{options.bucket}": f"gs://{options.bucket}"} if options.bucket else {}
    return checking.Site(options.topology, options.slices, buckets=buckets)


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    if further and action not in ("create", "keep"):
        raise ConfigError(f"{' '.join(further)}: '{action}' takes no flags of gcloud's own")
    if action in ("keep", "install"):
        checking.clone_to_send()  # before there is a slice, which costs
    if not options.dry_run:
        shell.require("gcloud")
        if ACTIONS[action]:
            buckets = google_cloud.buckets_in(command, options.bucket)
            google_cloud.warn_of_regions(buckets, google_cloud.region_of(options.zone), checked)
    checking.require_checked(checked.unchecked, options)
    slices = Slices(options, command, further)
    getattr(slices, action)()


class Slices:
    """The slices of a run, and what can be done with them; the methods without an underscore are the actions."""

    def __init__(self, options: SimpleNamespace, command: list[str], further: list[str]):
        self._options, self._command, self._further = options, command, further
        self._place = [f"--zone={options.zone}"]
        if options.project:
            self._place.append(f"--project={options.project}")
        # Several slices always queue.
        self._queued = options.queued or options.slices > 1
        self._resource = "queued-resources" if self._queued else "tpu-vm"
        multi_slice = options.slices > 1
        self._nodes = [
            f"{options.name}-{number}" if multi_slice else options.name
            for number in range(options.slices)
        ]
        self._way = ["--internal-ip"] if options.internal_ips else []
        if options.tunnel_through_iap:
            self._way = ["--tunnel-through-iap"]

    def create(self) -> None:
        options = self._options
        tpu, accelerator, alone = chips.check_vm_slice(options.topology)
        _, _, shape = options.topology.partition(":")
        what = [f"--accelerator-type={accelerator}"]
        if not alone:  # That names another shape.
            what = [f"--type={tpu.vm}", f"--topology={shape}"]
        for name in ("spot", "reserved", "internal_ips"):
            what += [f"--{name.replace('_', '-')}"] if getattr(options, name) else []
        for name in ("network", "subnetwork", "service_account"):
            if value := getattr(options, name):
                what.append(f"--{name.replace('_', '-')}={value}")
        if options.service_account:
            what.append("--scopes=cloud-platform")
        version = options.version or tpu.vm_runtime
        create = [*GCLOUD, self._resource, "create", options.name, *self._place, *what]
        if not self._queued:
            self._run([*create, f"--version={version}", *self._further])
            return
        nodes = [f"--node-id={options.name}"]
        if options.slices > 1:
            nodes = [f"--node-count={options.slices}", f"--node-prefix={options.name}"]
        self._run([*create, *nodes, f"--runtime-version={version}", *self._further])
        while not options.dry_run and (state := self._state()) != "ACTIVE":
            if state in ("FAILED", "SUSPENDED", ""):
                raise UserError(
                    f"the request for {options.name} has failed: see 'vit_jax launch tpu_vm status'"
                )
            time.sleep(30)

    def install(self) -> None:
        bucket = f" --bucket={self._options.bucket}" if self._options.bucket else ""
        version = "" if install.clone_folder() else f" --version={__version__}"
        with tempfile.TemporaryDirectory() as folder:
            archive = f"{folder}/vit_jax.tar.gz"
            self._pack(archive)
            for node in self._nodes:
                target = f"{node}:vit_jax.tar.gz"
                self._run(
                    [
                        *GCLOUD,
                        "tpu-vm",
                        "scp",
                        archive,
                        target,
                        *self._place,
                        *self._way,
                        "--worker=all",
                    ]
                )
                self._on(
                    node,
                    "all",
                    "mkdir -p vit_jax && tar -xzf vit_jax.tar.gz -C vit_jax && "
                    f"bash vit_jax/launch/tpu_worker.sh install{bucket}{version}",
                )

    def _pack(self, archive: str) -> None:
        """What all workers get: this folder, with the recipes in it, and `launch/`."""
        clone = install.clone_folder()
        print(f"# {archive}: {Path.cwd()} without {', '.join(sorted(NOT_SENT))}")
        if self._options.dry_run:
            return
        with tarfile.open(archive, "w:gz") as tar:
            tar.add(".", filter=_sent)
            if not clone:
                tar.add(shipped.launch_folder(), "launch", filter=_sent)

    def start(self) -> None:
        slice_flags, slices = "", self._options.slices
        first = self._address() if slices > 1 else ""
        for number, node in enumerate(self._nodes):
            if slices > 1:
                slice_flags = f" --slices={slices} --slice={number} --coordinator={first}"
            line = f"bash vit_jax/launch/tpu_worker.sh start{slice_flags} -- {shell.text(self._command)}"
            self._on(node, "all", line)

    def _address(self) -> str:
        """The address of the first worker of the first slice."""
        query = [
            *GCLOUD, "tpu-vm", "describe", self._nodes[0], *self._place,
            "--format=value(networkEndpoints[0].ipAddress)",
        ]  # fmt: skip
        if self._options.dry_run:
            print(f"# ADDRESS is what this prints: {shell.text(query)}")
            return "ADDRESS"
        address = shell.ask(query)
        if not address:
            raise UserError(f"{self._nodes[0]} has no address yet")
        return address

    def keep(self) -> None:
        options = self._options
        if options.dry_run:
            print(f"# every minute:\n{shell.text(self._describe())}\n# when it was taken away:")
            self.delete()
            print("# when there is none:")
            self.create()
            self.install()
            self.start()
            return
        failures = 0
        while True:
            # What fails in here, as while workers come and go, is tried again.
            match self._state():
                case "READY" | "ACTIVE":
                    ended, failures = self._look_after(failures)
                    if ended:
                        return
                case "PREEMPTED" | "TERMINATED" | "STOPPED" | "SUSPENDED" | "FAILED":
                    _try(self.delete)
                case "":
                    if _try(self.create):
                        failures = self._set_up(0)
                    else:  # No capacity, perhaps; nothing costs.
                        failures += 1
            pause = options.every << min(failures, 10)
            time.sleep(min(pause, max(LONGEST_PAUSE, options.every)))

    def _set_up(self, failures: int) -> int:
        """Installs and starts; how often in a row that has failed now. The slice costs meanwhile: this is not tried
        without end.
        """
        if _try(self.install) and _try(self.start):
            return 0
        if failures + 1 >= self._options.max_attempts:
            raise UserError(
                f"{self._options.name}: installing or starting has failed {failures + 1} times in a row, see above "
                f"(--max_attempts). {self._costs()}"
            )
        return failures + 1

    def _look_after(self, failures: int) -> tuple[bool, int]:
        """Whether the run is done, and the failures in a row; starts it where it was not started: on new workers."""
        states = self._services()
        if states == {"exited"}:
            print(f"{self._options.name}: the run is done. {self._costs()}")
            return True, 0
        if "failed" in states:
            lines = "journalctl --unit=vit_jax --lines=50 --output=cat --no-pager"
            _try(lambda: self._on(self._nodes[0], "0", lines))
            raise UserError(
                f"{self._options.name}: the run has ended with an error that a restart will not cure. {self._costs()}"
            )
        if "dead" in states:
            return False, self._set_up(failures)
        return False, 0

    def _costs(self) -> str:
        """That the slice still costs, and what ends that."""
        queued = ["--queued"] if self._options.queued else []
        slices = [f"--slices={self._options.slices}"] if self._options.slices > 1 else []
        name = f"--name={self._options.name}"
        words = ["vit_jax", "launch", "tpu_vm", "delete", name, *self._place, *queued, *slices]
        return f"The slice is still there and COSTS until: {shell.text(words)}"

    def status(self) -> None:
        self._run(self._describe()[:-1])
        for node in self._nodes:
            self._on(node, "all", "systemctl status --no-pager --lines=3 vit_jax || true")

    def logs(self) -> None:
        node, worker = self._nodes[self._options.slice], str(self._options.worker)
        self._on(node, worker, "journalctl --unit=vit_jax --follow --lines=100 --output=cat")

    def stop(self) -> None:
        for node in self._nodes:
            self._on(node, "all", "sudo systemctl stop vit_jax")

    def delete(self) -> None:
        force = ["--force"] if self._queued else []
        name = self._options.name
        self._run([*GCLOUD, self._resource, "delete", name, *self._place, "--quiet", *force])

    def _on(self, node: str, worker: str, line: str) -> None:
        """Runs a line of shell on one or all workers of a slice."""
        self._run(self._ssh(node, worker, line))

    def _ssh(self, node: str, worker: str, line: str) -> list[str]:
        where = [*self._place, *self._way, f"--worker={worker}"]
        return [*GCLOUD, "tpu-vm", "ssh", node, *where, f"--command={line}"]

    def _describe(self) -> list[str]:
        field = "state.state" if self._queued else "state"
        name = self._options.name
        return [*GCLOUD, self._resource, "describe", name, *self._place, f"--format=value({field})"]

    def _state(self) -> str:
        """READY (a slice) or ACTIVE (a request) when it can be used; '' when there is none."""
        return shell.ask(self._describe()) or ""

    def _services(self) -> set[str]:
        """The states of the service on all workers: running, exited (done), failed, dead (never started) and others;
        none when the workers cannot be reached.
        """
        line = "systemctl show --property=SubState --value vit_jax"
        answers = (shell.ask(self._ssh(node, "all", line)) for node in self._nodes)
        return {state for answer in answers for state in (answer or "").split()}

    def _run(self, words: list[str]) -> None:
        shell.run(words, dry_run=self._options.dry_run)


def _try(action) -> bool:
    """Whether an action succeeded; what fails is shown."""
    try:
        action()
    except ConfigError:
        raise
    except UserError as error:
        shell.warn(str(error))
        return False
    return True


def _sent(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if NOT_SENT & set(Path(entry.name).parts) else entry
