"""The training command is checked before anything is started: that it is one of ours, that its files and its workdir
can be where the run will be and, by its own `--dry_run` in one process, that it fits the devices there.
"""

import dataclasses
import json
import pathlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Collection, Mapping
from types import SimpleNamespace

from launch import local
from vit_jax.base import install, subprocesses
from vit_jax.base.errors import ConfigError
from vit_jax.base.schema import nearest
from vit_jax.recipes import shipped

IMAGE_BYTES = 110e3  # of a file, more or less; for what reading from another region costs
_SIMULATED = r"--xla_force_host_platform_device_count=(\d+)"
LOCAL_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/run")  # of each machine by their nature
H100 = "NVIDIA H100 80GB HBM3"


@dataclasses.dataclass(frozen=True)
class Site:
    """Where a run will be.

    Attributes:
      topology: of its devices, as `vit_jax plan` takes it; '' if it is not known.
      slices: how many of them.
      gpus: how many in all; 0 of TPUs.
      buckets: buckets that are mounted there, to be read: address by folder.
      remote: its machines have other disks than this one.
      sent: the folder in which it was called is sent to them, or in their image.
      shared_disk: a folder without an address can be seen by all its machines.
      several_machines: it has several, although they see the disks of this one.
    """

    topology: str = ""
    slices: int = 1
    gpus: int = 0
    buckets: dict[str, str] = dataclasses.field(default_factory=dict)
    remote: bool = True
    sent: bool = True
    shared_disk: bool = False
    several_machines: bool = False


@dataclasses.dataclass
class Checked:
    """What is known of a training command.

    Attributes:
      lines: what it will do, a sentence each.
      unchecked: what could not be checked, a sentence each.
      local: the folder of its local checkpoints; '' without.
      reads: bytes of images, about; 0 if it is not known.
    """

    lines: list[str]
    unchecked: list[str]
    local: str
    reads: float = 0.0


def check_name(command: list[str], commands: Collection[str]) -> None:
    """Raises `ConfigError` unless a command line begins with one of the commands of vit_jax that can be launched."""
    if not command:
        raise ConfigError("what is to run? … -- train --config=RECIPE --workdir=gs://BUCKET/NAME")
    if command[0] not in commands:
        raise ConfigError(f"{command[0]!r} is no command of vit_jax{nearest(command[0], commands)}")
    if command[0] == "launch":
        raise ConfigError("launch does not launch itself: put what is to train behind --")


def check_command(command: list[str], site: Site, price: float = 0.0) -> Checked:
    """Checks a training command for a site.

    Raises:
      ConfigError: it would fail there.
    """
    name, *words = command
    _check_workdir(name, local.workdir_of(words), site)
    _check_files(words, site)
    if name != "train":
        folder = local.value_of(words, "--config.checkpoint.local") or ""
        return Checked([], [f"'{name}' has no --dry_run: its flags"], folder)
    return _dry_run(words, site, price)


def _check_workdir(name: str, workdir: str | None, site: Site) -> None:
    if not workdir:
        if name == "train":
            raise ConfigError(
                "--workdir=DIR is missing in the training command: where checkpoints go"
            )
        return
    for folder, address in site.buckets.items():
        if f"{workdir}/".startswith(f"{folder}/"):
            raise ConfigError(
                f"--workdir={workdir}: {folder} is mounted to be read only; set "
                f"--workdir={address}{workdir.removeprefix(folder)}"
            )
    if (site.remote or site.several_machines) and _is_of_one_machine(workdir):
        print(
            f"vit_jax launch: warning: --workdir={workdir} is a folder that each machine usually has for itself: "
            "unless all see the same one, the run ends with 2 before its first step. Set a folder on a network disk",
            file=sys.stderr,
        )
    if site.remote and not workdir.startswith("gs://"):
        if workdir.startswith("s3://"):
            raise ConfigError(f"--workdir={workdir}: checkpoints cannot be saved in S3; set gs://…")
        if not (site.shared_disk and workdir.startswith(("/", "~"))):
            need = "absolute, on a disk that all machines see, or" if site.shared_disk else "in"
            raise ConfigError(
                f"--workdir={workdir}: must be {need} a bucket, e.g. gs://BUCKET/NAME: the run is on other "
                "machines, which may be replaced"
            )


def _is_of_one_machine(folder: str) -> bool:
    """Whether a folder is usually on a disk, or in the memory, of each machine."""
    path = pathlib.Path(folder)
    roots = [*LOCAL_FOLDERS, tempfile.gettempdir()]
    return any(path.is_relative_to(root) for root in roots)


def _check_files(words: list[str], site: Site) -> None:
    """That recipes and files to register are there where the run will be."""
    if not site.remote or site.shared_disk:
        return
    recipe = (local.value_of(words, "--config") or "").partition(":")[0]
    named = {"--config": recipe, "--register": local.value_of(words, "--register") or ""}
    for flag, path in named.items():
        if not path or (flag == "--config" and shipped.recipe_path(path)):
            continue
        if path.startswith(("/", "~", "..")):
            raise ConfigError(
                f"{flag}={path}: is on this machine only; name it by a path below this folder, "
                "which goes with the run"
            )
        if not site.sent:
            raise ConfigError(
                f"{flag}={path}: is a file of yours, which Python's own image does not have; build one with "
                "it (launch/docker/tpu.Dockerfile) and set --image=IMAGE"
            )


def _dry_run(words: list[str], site: Site, price: float) -> Checked:
    """What `train --dry_run` finds for the devices of the site."""
    local_words = [_from_here(word, site) for word in words]
    target = [f"--topology={site.topology}", f"--slices={site.slices}"] if site.topology else []
    target += [f"--price_per_chip_hour={price}"] if price and target else []
    code, out, err = run_vit_jax("train", *local_words, *target, "--dry_run", "--json")
    if code:
        raise ConfigError(
            f"nothing was started, since the training command is refused:\n{err.strip()}"
        )
    print(err, end="", file=sys.stderr)
    report = json.loads(out.splitlines()[-1])
    runs = [report] if "lines" in report else list(report.values())
    lines = [line for run in runs for line in run["lines"]]
    unchecked = list(dict.fromkeys(text for run in runs for text in run["unchecked"]))
    if site.remote and not site.topology:
        unchecked.append("whether config.mesh and config.batch_size fit the devices")
    if site.gpus and "estimate" in report:
        hours = report["estimate"]["seconds"][H100] / site.gpus / 3600
        cost = f", cost at least {hours * site.gpus * price:,.2f}" if price else ""
        lines.append(f"time: at least {hours:.3g} hours on {site.gpus} GPUs like {H100}{cost}")
    reads = sum(run.get("steps", 0) * run.get("batch_size", 0) for run in runs) * IMAGE_BYTES
    return Checked(lines, unchecked, runs[-1]["local"], reads)


def _from_here(word: str, site: Site) -> str:
    """A word of the command, with folders that are mounted there as addresses that this machine can read."""
    flag, equals, value = word.partition("=")
    for folder, address in site.buckets.items():
        if equals and f"{value}/".startswith(f"{folder}/"):
            return f"{flag}={address}{value.removeprefix(folder)}"
    return word


def simulated_devices(environment: Mapping[str, str]) -> int:
    """How many CPU devices a process has."""
    match = re.search(_SIMULATED, environment.get("XLA_FLAGS", ""))
    return int(match[1]) if match else 1


def run_vit_jax(*words: str) -> tuple[int, str, str]:
    """Runs a command of vit_jax in a process of its own: exit code, standard output and error."""
    command, environment = subprocesses.python_module("vit_jax")
    # Devices are those of --topology, not those that a rehearsal in this shell simulates.
    if settings := environment.pop("XLA_FLAGS", ""):
        environment["XLA_FLAGS"] = re.sub(_SIMULATED, "", settings)
    done = subprocess.run([*command, *words], capture_output=True, text=True, env=environment)
    return done.returncode, done.stdout, done.stderr


def clone_to_send() -> pathlib.Path | None:
    """The clone that vit_jax is in, which other machines install from this folder; `None` if they install a version.

    Raises:
      ConfigError: it is another folder than this one.
    """
    clone = install.clone_folder()
    if clone and not pathlib.Path.cwd().samefile(clone):
        raise ConfigError(
            f"vit_jax is in the clone {clone}: call this there, since the machines of the run get the folder in which "
            "you call it, and install vit_jax from it"
        )
    return clone


def require_checked(unchecked: list[str], options: SimpleNamespace) -> None:
    """Raises `ConfigError` if something could not be checked, unless --unchecked is set, or nothing is to be started:
    then it is printed alone.
    """
    if not unchecked:
        return
    text = "".join(f"\n  {sentence}" for sentence in unchecked)
    if options.unchecked:
        print(f"vit_jax launch: not checked, since --unchecked is set:{text}", file=sys.stderr)
    elif options.dry_run:
        print(
            f"vit_jax launch: could not be checked from here:{text}\nto start without --dry_run, set --unchecked",
            file=sys.stderr,
        )
    else:
        raise ConfigError(
            f"could not be checked from here:{text}\nnothing was started; to start all the same, set --unchecked"
        )
