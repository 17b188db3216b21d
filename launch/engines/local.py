"""Several processes on this machine, or one host of a pod, by `launch/local.py`, which starts them again."""

import os
import sys
from types import SimpleNamespace

from launch import checking, local, shell
from vit_jax.devices.local import platform_of_children
from vit_jax.recipes import shipped

NUMBERS = ("processes", "devices_per_process", "max_restarts", "backoff", "grace")
FLAGS = (*NUMBERS, "process_logs")
NEEDED = ()
DEFAULTS = {"max_restarts": 5, "grace": 20}
PROGRAM = ""
ACTIONS = {"start": True}


def check(action: str, options: SimpleNamespace) -> checking.Site:
    each = options.devices_per_process
    if not each and platform_of_children() == "cpu":
        each = checking.simulated_devices(os.environ)
    # Real devices the training command finds itself.
    return checking.Site(f"cpu:{options.processes * each}" if each else "", remote=False)


def start(
    action: str, options: SimpleNamespace, command: list[str], further: list[str], checked: checking.Checked
) -> None:  # fmt: skip
    words = [f"--{name}={getattr(options, name)}" for name in NUMBERS]
    if options.process_logs:
        words.append(f"--log_dir={options.process_logs}")
    words += ["--", *command]
    checking.require_checked(checked.unchecked, options)
    if options.dry_run:
        print(shell.text([sys.executable, str(shipped.launch_folder() / "local.py"), *words]))
        return
    sys.exit(local.main(words))
