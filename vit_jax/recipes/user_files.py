"""Python files of recipes: the one that --config names, the one that a run keeps of itself, and users'
files that add to the package what it lacks (a model family, an objective, an evaluator, a data
source).
"""

import ast
import importlib.util
import inspect
import operator
import pathlib
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

from etils import epath
from ml_collections import ConfigDict

from vit_jax.base import places, schema
from vit_jax.base.errors import ConfigError, UserError
from vit_jax.config import Config, config_class
from vit_jax.recipes import shipped

if TYPE_CHECKING:
    from vit_jax.annotations import RunConfig

# How recipes of `to_python` register files: `register` up to version 0.2.
_REGISTER = ("register_file", "register")
# Files that were run, see `loaded_files`.
_LOADED: set[pathlib.Path] = set()


def load_config(spec: str) -> "RunConfig":
    """The config of a recipe: `NAME`, `FILE`, or either with `:ARGUMENT`, e.g. `vit_i21k:B/16,light2`.

    A NAME is that of a recipe of this package (`vit_jax recipes` lists them); a local file NAME.py comes first. The
    file defines `get_config()` or `get_config(argument)`; it may import its neighbours, and the recipes of this
    package, by name.

    Raises:
      ConfigError: there is no such file, it fails, it is no config, or it refuses the argument.
    """
    return cast("RunConfig", _config(*_module(spec), spec))


def load_recipe(spec: str) -> dict[str, ConfigDict]:
    """The runs of any recipe by their names; of a recipe of one run its config alone, by ''.

    Raises:
      ConfigError: as `load_config`.
    """
    name, where, module = _module(spec)
    if hasattr(module, "get_runs"):
        return _runs(where, module, spec)
    return {"": _config(name, where, module, spec)}


def _config(name: str, where: str, module: types.ModuleType, spec: str) -> ConfigDict:
    if not hasattr(module, "get_config"):
        is_experiment = hasattr(module, "get_runs")
        why = (
            "is an experiment of several runs: vit_jax train"
            if is_experiment
            else "defines no function get_config"
        )
        raise ConfigError(f"{where}: {name} {why}")
    return _checked(_call(module, "get_config", spec), "get_config()", spec)


def _runs(where: str, module: types.ModuleType, spec: str) -> dict[str, ConfigDict]:
    runs = _call(module, "get_runs", spec)
    if not isinstance(runs, dict) or not runs:
        raise ConfigError(f"{where}: get_runs() must return configs by the names of their runs")
    return {name: _checked(config, f"get_runs()[{name!r}]", spec) for name, config in runs.items()}


def _module(spec: str) -> tuple[str, str, types.ModuleType]:
    """Of NAME[:ARGUMENT]: the name, what to call it in messages, and the module of its file."""
    name = _name(spec)
    where = f"--config={spec}"
    path = shipped.find_recipe(str(_local(name, "--config")), where)
    return name, where, _load(path, where)


def _name(spec: str) -> str:
    """The name or file in NAME[:ARGUMENT], which may be an address."""
    scheme = f"{spec.partition('://')[0]}://" if places.is_address(spec) else ""
    return scheme + spec.removeprefix(scheme).partition(":")[0]


def _local(name: str, field: str) -> pathlib.Path:
    """The path of a file of Python, which is not run from elsewhere."""
    if not places.is_address(name):
        return pathlib.Path(name)
    return pathlib.Path(places.locate(name, field, instead="download the file first"))


def _call(module: types.ModuleType, function_name: str, spec: str) -> object:
    """What a function of a recipe's module gives for the argument in `spec`."""
    name = _name(spec)
    where = f"--config={spec}"
    function: Callable = getattr(module, function_name)
    argument = spec[len(name) + 1 :]
    parameters = inspect.signature(function).parameters.values()
    if argument and not parameters:
        raise ConfigError(f"{where}: {name} takes no argument after ':'")
    if not argument and any(p.default is p.empty for p in parameters):
        raise ConfigError(f"{where}: {name} needs an argument: --config={name}:ARGUMENT")
    try:
        return function(argument) if argument else function()
    except UserError:
        raise
    except Exception as error:
        raise _failure(error, where, pathlib.Path(module.__file__)) from error


def _checked(config: object, source: str, spec: str) -> ConfigDict:
    where = f"--config={spec}"
    name = _name(spec)
    if not isinstance(config, ConfigDict):
        raise ConfigError(
            f"{where}: {source} of {name} returned {_what(config)}. It must return a config that "
            "starts from vit_jax.config.default_config()"
        )
    try:
        schema.check_fields(config_class(config), config)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}; a config starts from default_config()") from None
    return config


def register(path: str) -> None:
    """Runs a user's file for what it adds to the package: it calls `register_objective`, say.

    Raises:
      ConfigError: there is no such file, or it fails.
    """
    _load(_local(path, "--register"), f"--register={path}")


def registered_by(recipe: epath.Path) -> list[str]:
    """The files that a recipe of `to_python` registers; [] where there is no such recipe."""
    if not recipe.exists():
        return []
    tree = ast.parse(recipe.read_text())
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    return [
        call.args[0].value
        for call in calls
        if getattr(call.func, "id", "") in _REGISTER and isinstance(call.args[0], ast.Constant)
    ]


def loaded_files() -> list[pathlib.Path]:
    """The recipes and registered files that this process has run, and the neighbours that they have imported."""
    folders = {file.parent for file in _LOADED}
    modules = list(sys.modules.values())
    files = [getattr(module, "__file__", None) for module in modules]
    paths = {pathlib.Path(file) for file in files if file}
    return sorted(_LOADED | {path for path in paths if path.parent in folders})


def outside(definitions: Iterable) -> list[str]:
    """The files outside of the package that define some of these classes or functions."""
    modules = [sys.modules.get(definition.__module__) for definition in definitions]
    files = [m.__file__ for m in modules if m and m.__name__.split(".")[0] != "vit_jax"]
    return list(dict.fromkeys(files))


def to_python(config: Config, head: Iterable[str], registered: Iterable[str] = ()) -> str:
    """A recipe that gives this config: what differs from the defaults, in their order.

    Args:
      config: from `assembly.resolve`.
      head: lines for the top of the file.
      registered: files that it needs, see `register`.
    """
    head = "\n".join(head).replace("\\", "\\\\").replace('"', "'")
    calls = [f"register_file({path!r})" for path in registered]
    imports = ["from vit_jax.config import default_config"]
    if calls:
        imports = ["from vit_jax.extend import default_config, register_file"]
    settings = []
    for name, field in schema.walk(type(config)):
        value = operator.attrgetter(name)(config)
        if value != field.default:
            settings.append(f"    config.{name} = {value!r}")
    body = ["def get_config():", "    config = default_config()", *settings, "    return config"]
    calls = ["", *calls] if calls else []
    return "\n".join([f'"""{head}\n"""', "", *imports, *calls, "", "", *body, ""])


def _load(path: pathlib.Path, where: str) -> types.ModuleType:
    """The module of a file, which may import its neighbours by name; a copy of a recipe has those that it
    had where it was.
    """
    if not path.is_file():
        kind = "is a folder or a device, not a file" if path.exists() else "does not exist"
        raise ConfigError(f"{where}: {path} {kind}: name a Python file")
    folder = str(path.resolve().parent)
    ours = str(shipped.recipes_folder())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    if ours not in sys.path:
        sys.path.append(ours)
    name = path.stem
    file = str(path.resolve())
    if name in sys.modules and getattr(sys.modules[name], "__file__", None) != file:
        name = file  # So that it does not replace a module of the same name.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise ConfigError(f"{where}: {path} is no Python file: its name must end in .py")
    # Dataclasses of the file, such as a family's config, look up their types here.
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    _LOADED.add(path.resolve())
    try:
        spec.loader.exec_module(module)
    except UserError:
        raise
    except Exception as error:
        raise _failure(error, where, path) from error
    return module


def _failure(error: Exception, where: str, path: pathlib.Path) -> ConfigError:
    """An error in a user's file, reported with the line where it arose: the last in the folder of
    the file, which may have called others.
    """
    if isinstance(error, SyntaxError):
        line = f", line {error.lineno}" if error.lineno else ""  # none of a file with null bytes
        text = f": {error.text.strip()!r}" if error.text else ""
        return ConfigError(f"{where}: {error.filename or path}{line}: {error.msg}{text}")
    frames = traceback.extract_tb(error.__traceback__)
    folder = path.resolve().parent
    own = [f for f in frames if pathlib.Path(f.filename).resolve().parent == folder]
    frame = (own or frames)[-1]
    return ConfigError(
        f"{where}: {frame.filename}, line {frame.lineno}, {frame.line!r}: {type(error).__name__}: {error}"
    )


def _what(value) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
