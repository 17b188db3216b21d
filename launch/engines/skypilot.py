"""Machines of any cloud, by SkyPilot (pip install skypilot) and `launch/skypilot/train.yaml`."""

import re
from types import SimpleNamespace

from launch import checking, flags, shell
from vit_jax import __version__
from vit_jax.base.errors import ConfigError
from vit_jax.devices import chips
from vit_jax.recipes import shipped

FLAGS = (
    "name", "topology", "nodes", "gpu", "gpus_per_node", "processes_per_node", "extra", "spot", "max_restarts", "env",
)  # fmt: skip
NEEDED = ("name", "nodes")
DEFAULTS = {"gpus_per_node": 8, "max_restarts": 5}
PROGRAM = "sky"
ACTIONS = {"start": True}


def check(action: str, options: SimpleNamespace) -> checking.Site:
    flags.check_label("name", options.name)
    flags.variables(options.env)
    if not options.topology:
        if not options.gpus_per_node:
            raise ConfigError(
                "--gpus_per_node=0: set how many --gpu=KIND, or --topology=KIND:SHAPE"
            )
        flags.processes_of_node(options)
        gpus = options.nodes * options.gpus_per_node
        return checking.Site(f"cpu:{gpus}", gpus=gpus)
    if options.nodes != 1:
        raise ConfigError(
            f"--nodes={options.nodes}: a TPU slice is one machine for SkyPilot; for several slices as one run use "
            "'vit_jax launch gke' or 'vit_jax launch tpu_vm'"
        )
    if options.processes_per_node > 1:
        raise ConfigError(
            f"--processes_per_node={options.processes_per_node}: is for GPUs; one process uses all chips of a TPU VM"
        )
    chips.check_vm_slice(options.topology)
    return checking.Site(options.topology)


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    accelerators, extra = f"{options.gpu}:{options.gpus_per_node}", options.extra
    processes = 1 if options.topology else flags.processes_of_node(options)
    if options.topology:
        accelerators = f"tpu-{chips.check_vm_slice(options.topology)[1]}"
        extra = re.sub(r"cuda\d*", "tpu", extra)
    # Only a managed job replaces machines that are taken away.
    verb = (
        ["jobs", "launch", "--use-spot"]
        if options.spot
        else ["launch", f"--cluster={options.name}"]
    )
    clone = checking.clone_to_send()
    words = [
        "sky", *verb, f"--name={options.name}", f"--num-nodes={options.nodes}", f"--gpus={accelerators}",
        "--workdir=.", f"--env=COMMAND={shell.text(command)}", f"--env=EXTRA={extra}",
        f"--env=VERSION={'' if clone else __version__}", f"--env=MAX_RESTARTS={options.max_restarts}",
        f"--env=PROCESSES_PER_NODE={processes}",
        *(f"--env={name}={value}" for name, value in flags.variables(options.env).items()),
        *further, str(shipped.launch_folder() / "skypilot/train.yaml"),
    ]  # fmt: skip
    checking.require_checked(checked.unchecked, options)
    shell.run(words, dry_run=options.dry_run)
