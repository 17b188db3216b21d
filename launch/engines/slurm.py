"""Nodes of a SLURM cluster, by sbatch and `launch/slurm/train.sbatch`. It is called where sbatch is, in the environment
in which the nodes find vit_jax.
"""

import os
import sys
from types import SimpleNamespace

from launch import checking, flags, shell
from vit_jax.recipes import shipped

FLAGS = (
    "name", "nodes", "gpus_per_node", "processes_per_node", "queue", "max_restarts", "grace",
)  # fmt: skip
NEEDED = ("nodes",)
DEFAULTS = {"max_restarts": 5, "grace": 300, "name": "vit_jax"}
PROGRAM = "sbatch"
ACTIONS = {"start": True}


def check(action: str, options: SimpleNamespace) -> checking.Site:
    gpus = options.gpus_per_node
    processes = flags.processes_of_node(options)
    count = options.nodes * (gpus or processes)  # without GPUs each process has one device
    return checking.Site(
        f"cpu:{count}",
        gpus=options.nodes * gpus,
        remote=False,
        several_machines=options.nodes > 1,
    )


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    script = str(shipped.launch_folder() / "slurm/train.sbatch")
    words = ["sbatch", f"--job-name={options.name}", f"--nodes={options.nodes}"]
    if options.gpus_per_node:
        words.append(f"--gpus-per-node={options.gpus_per_node}")
    # Where neither is given, the script asks SLURM for the GPUs.
    if options.gpus_per_node or options.processes_per_node:
        words.append(f"--ntasks-per-node={flags.processes_of_node(options)}")
    words += [
        f"--signal=TERM@{options.grace}",
        *([f"--partition={options.queue}"] if options.queue else []),
        *further,
        script,
        *command,
    ]
    # What the script reads; sbatch passes the environment on.
    variables = {
        "PYTHON": os.environ.get("PYTHON", sys.executable),
        "MAX_RESTARTS": str(options.max_restarts),
    }
    checking.require_checked(checked.unchecked, options)
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *words]
    if not options.dry_run:
        shell.require("sbatch")
    shell.run(words, dry_run=options.dry_run)
