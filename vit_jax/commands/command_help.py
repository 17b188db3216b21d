"""What `--help` prints of a command."""

import inspect
import shutil
import sys
import textwrap
from typing import TYPE_CHECKING

from vit_jax.commands import config_flags
from vit_jax.commands.flags import FLAGS, own_flags

if TYPE_CHECKING:
    from ml_collections import ConfigDict


def help_of(command: object) -> str:
    """What a command, or a module, says of itself, its flags, and the fields of the config where it takes one: those
    that the recipe on the command line reads, with its values. `--help all` lists those of all recipes.
    """
    from vit_jax.commands.config_help import WIDTH, config_help

    width = min(shutil.get_terminal_size((WIDTH, 0)).columns, WIDTH)
    text = [inspect.getdoc(command), ""]
    for flag in own_flags():
        line = " ".join(f"--{flag.name}: {flag.help}".split())
        text += textwrap.wrap(line, width, initial_indent="  ", subsequent_indent="      ")
    if "config" not in FLAGS:
        return "\n".join(text)
    settings, others = config_flags.settings_apart(sys.argv)
    rest = FLAGS([argument for argument in others if argument not in ("-h", "--help")])[1:]
    config, whose = _config_to_show(settings)
    fields = config_help(config, everything="all" in rest, width=width)
    return "\n".join([*text, "", f"Fields of the config, with {whose}:", "", fields])


def _config_to_show(settings: list[tuple[str, str]]) -> "tuple[ConfigDict, str]":
    """The config whose values help shows, and whose values these are."""
    from vit_jax.base.settings import change
    from vit_jax.config import Config, default_config

    if not FLAGS.config:
        config = default_config()
        change(config, Config, settings)
        return config, "their defaults"
    name, config = next(iter(config_flags.load_recipe(settings)[0].items()))
    run = f"the run {name} of " if name else ""
    return config, f"the values of {run}{FLAGS.config}"
