"""The config on the command line: --config=RECIPE[:ARGUMENT] and --config.FIELD=VALUE."""

import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from absl import flags, logging

from vit_jax.commands.flags import FLAGS, define_json, define_register, wants_help

if TYPE_CHECKING:
    from ml_collections import ConfigDict

_SETTING = re.compile(r"--?(?P<no>no)?config\.(?P<name>[\w.]+)(?:=(?P<value>.*))?", re.DOTALL)


def define_config() -> list[tuple[str, str]]:
    """Flag --config=RECIPE[:ARGUMENT], and `take_settings` for --config.FIELD=VALUE."""
    flags.DEFINE_string(
        "config", None, "the recipe: a name of 'vit_jax recipes' or a file, perhaps with :ARGUMENT"
    )
    define_json()
    define_register()
    return take_settings()


def take_settings() -> list[tuple[str, str]]:
    """Takes --config.FIELD=VALUE, or --config.FIELD VALUE, out of the command line: (field, value)
    of each.
    """
    if wants_help():
        return []
    settings, sys.argv = settings_apart(sys.argv)
    return settings


def load_config(
    settings: list[tuple[str, str]], recipe: str = ""
) -> "tuple[ConfigDict, dict[str, tuple]]":
    """The recipe, by default the one that --config names, with the settings of the command line, and what
    those changed of it, see `base.settings.change`; after `parse_flags`.
    """
    from vit_jax.base.settings import change
    from vit_jax.config import Config
    from vit_jax.recipes import user_files

    config = user_files.load_config(recipe or _recipe())
    return config, change(config, Config, settings)


def load_recipe(
    settings: list[tuple[str, str]],
) -> "tuple[dict[str, ConfigDict], dict[str, tuple]]":
    """The runs of the recipe that --config names, '' of a recipe of one, each with the settings of the command
    line, and what those changed of the last; see `load_config`.
    """
    from vit_jax.base.settings import change
    from vit_jax.config import Config
    from vit_jax.recipes import user_files

    runs, changes = user_files.load_recipe(_recipe()), {}
    for config in runs.values():
        changes = change(config, Config, settings)
    return runs, changes


def _recipe() -> str:
    """What --config names."""
    if not FLAGS.config:
        raise flags.Error(
            "which config? --config=RECIPE[:ARGUMENT], e.g. --config=digits ('vit_jax recipes' lists all)"
        )
    return FLAGS.config


def log_recipe(changes: Mapping[str, tuple]) -> None:
    """Logs which recipe runs, and what the command line changes of it; see `load_config`."""
    changed = ", ".join(
        f"{name} = {new!r} (recipe: {'the default' if old is None else repr(old)})"
        for name, (old, new) in changes.items()
    )
    logging.info("recipe: %s%s", FLAGS.config, f"; changed: {changed}" if changed else "")


def warn_of_unread(config: "ConfigDict", changes: Mapping[str, tuple]) -> None:
    """Warns of what the command line changes and nothing reads; see `load_config`."""
    from vit_jax.base.settings import without_effect
    from vit_jax.config import Config

    for name, others in without_effect(config, Config, changes).items():
        logging.warning("config.%s = %r has no effect with %s", name, changes[name][1], others)


def settings_apart(arguments: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """The settings of config fields, and all other arguments."""
    settings, others, arguments = [], [], iter(arguments)
    for argument in arguments:
        match = _SETTING.fullmatch(argument)
        if argument == "--":
            others += [argument, *arguments]
        elif not match:
            others.append(argument)
        else:
            name, value = match["name"], match["value"]
            if value is None and _is_switch(name):
                value = str(not match["no"])
            elif value is None:
                value = next(arguments, "--")
                if value.startswith("--"):
                    raise flags.Error(f"{argument}=VALUE: the value is missing")
            settings.append((name, value))
    return settings, others


def _is_switch(name: str) -> bool:
    """Whether a config field is a bool, which may be set without a value."""
    from vit_jax.base.schema import option_type, walk
    from vit_jax.config import Config, config_class

    field = dict(walk(Config)).get(name) or dict(walk(config_class())).get(name)
    return field is not None and option_type(field.type) is bool
