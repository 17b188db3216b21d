"""Python files of users: the recipe that --config=FILE names."""

import importlib.util
import inspect
import pathlib
import sys
import traceback

from ml_collections import ConfigDict

from vit_jax.base.errors import ConfigError


def load_config(spec: str) -> ConfigDict:
    """The config of a recipe: `FILE` or `FILE:ARGUMENT`, e.g. `configs/vit_i21k.py:B/16,light2`.

    The file defines `get_config()` or `get_config(argument)`; it may import its neighbours by name.

    Raises:
      ConfigError: there is no such file, or it is no config, or it refuses the argument.
    """
    name, _, argument = spec.partition(":")
    path = pathlib.Path(name)
    if not path.is_file():
        raise ConfigError(f"--config={spec}: there is no file {name}")
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(module_spec)
    # A recipe may define a family, and dataclasses look their module up.
    sys.modules.setdefault(path.stem, module)
    module_spec.loader.exec_module(module)
    if not hasattr(module, "get_config"):
        raise ConfigError(f"--config={spec}: {name} defines no function get_config")
    if argument and not inspect.signature(module.get_config).parameters:
        raise ConfigError(f"--config={spec}: {name} takes no argument after ':'")
    try:
        return module.get_config(argument) if argument else module.get_config()
    except (AttributeError, KeyError, TypeError) as error:
        # What a locked config raises for a field it does not have, or a value of another type.
        line = traceback.extract_tb(error.__traceback__)[1]
        raise ConfigError(
            f"--config={spec}: {line.filename}, line {line.lineno}, {line.line!r}: {error}"
        ) from error
