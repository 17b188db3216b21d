"""Starts a run: the flags of an engine are checked, then the training command, then the engine starts it."""

import importlib
from collections.abc import Collection
from types import ModuleType, SimpleNamespace

from launch import checking, flags

# An engine is a module of `engines/` with these names: FLAGS that it takes, beside those of all; NEEDED ones; DEFAULTS
# that differ; PROGRAM, which takes what stands behind a second --, '' if none does; ACTIONS, the first of which is the
# usual one, each with whether it runs the training command; `check(action, options)`, which gives the `checking.Site`;
# and `start(action, options, command, further, checked)`.
ENGINES = {
    "gke": "on TPU slices of a GKE cluster, by JobSet",
    "tpu_vm": "on TPU VMs, which are made, looked after and deleted",
    "xpk": "on a cluster that xpk has made",
    "slurm": "on nodes of a SLURM cluster",
    "ray": "on a Ray cluster, by Ray Train",
    "skypilot": "on machines of any cloud, by SkyPilot",
    "local": "as several processes on this machine",
}


def engine_of(name: str) -> ModuleType:
    """The module of an engine."""
    return importlib.import_module(f"launch.engines.{name}")


def start(
    name: str,
    action: str,
    options: SimpleNamespace,
    command: list[str],
    further: list[str],
    commands: Collection[str],
) -> None:
    """Starts a run, or does another action of an engine.

    Args:
      name: of `ENGINES`.
      action: of the engine.
      options: a value for each of its flags.
      command: of vit_jax, to run there.
      further: flags of the program that the engine calls.
      commands: those of vit_jax.

    Raises:
      ConfigError: the flags, or the training command, are wrong; nothing was started.
      UserError: another program has failed.
    """
    engine = engine_of(name)
    flags.check_values(options, engine.NEEDED)
    site = engine.check(action, options)
    checked = checking.Checked([], [], "")
    if engine.ACTIONS[action]:
        checking.check_name(command, commands)
        checked = checking.check_command(command, site, options.price_per_chip_hour)
        for line in checked.lines:
            print(f"# {line}")
    engine.start(action, options, joining_others(command), further, checked)


def joining_others(command: list[str]) -> list[str]:
    """The command for several hosts: `evaluate` joins other processes only where a flag says so."""
    if command[:1] != ["evaluate"] or any(word.startswith("--coordinator") for word in command):
        return command
    return [*command, "--coordinator=auto"]
