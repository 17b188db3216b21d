"""The recipes, the notebooks and the engines of `vit_jax launch` that come with the package: where they are, and
which file a name means.

They are `configs/`, `docs/notebooks/` and `launch/` of the repository; an installed package has the same files in
`vit_jax/configs/`, `vit_jax/notebooks/` and `vit_jax/launch/`.
"""

import difflib
import functools
import importlib.util
import pathlib
import shutil
import sys

from absl import logging

from vit_jax.base.errors import ConfigError

_PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_SHOWN = 3


def recipes_folder() -> pathlib.Path:
    """The folder of the recipes: inside an installed package, beside the package in a clone."""
    inside = _PACKAGE / "configs"
    return inside if inside.is_dir() else _PACKAGE.parent / "configs"


def notebooks_folder() -> pathlib.Path:
    """The folder of the notebooks."""
    inside = _PACKAGE / "notebooks"
    return inside if inside.is_dir() else _PACKAGE.parent / "docs" / "notebooks"


def launch_folder() -> pathlib.Path:
    """The folder of what `vit_jax launch` runs."""
    inside = _PACKAGE / "launch"
    return inside if inside.is_dir() else _PACKAGE.parent / "launch"


def find_launch() -> None:
    """Makes `import launch` find `launch_folder`, which an installed package has inside."""
    folder = launch_folder()
    module_spec = importlib.util.spec_from_file_location(
        "launch", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if "launch" not in sys.modules and module_spec is not None and module_spec.loader is not None:
        sys.modules["launch"] = importlib.util.module_from_spec(module_spec)
        module_spec.loader.exec_module(sys.modules["launch"])


def copy_notebooks(directory: str) -> list[pathlib.Path]:
    """Copies the notebooks to a folder, those that are not there: the paths of all."""
    folder = pathlib.Path(directory)
    paths = []
    for source in sorted(notebooks_folder().glob("*.ipynb")):
        paths.append(folder / source.name)
        if not paths[-1].exists():
            shutil.copyfile(source, paths[-1])
    return paths


def recipe_names() -> list[str]:
    """'axial', …, 'experiments/compute', …: paths below the folder, without suffix."""
    folder = recipes_folder()
    files = [*sorted(folder.glob("*.py")), *sorted(folder.glob("*/*.py"))]
    return [path.relative_to(folder).with_suffix("").as_posix() for path in files]


def recipe_path(name: str) -> pathlib.Path | None:
    """The file of a recipe that comes with the package: of 'digits', 'digits.py' or
    'configs/digits.py'; `None` for other names.
    """
    name = name.removeprefix("configs/").removesuffix(".py")
    return recipes_folder() / f"{name}.py" if name in recipe_names() else None


def find_recipe(name: str, where: str) -> pathlib.Path:
    """The file that `--config=NAME` means: a local one, or else the recipe of that name.

    Args:
      name: a path, with or without '.py', or a name of `recipe_names`.
      where: what to call it in messages.

    Raises:
      ConfigError: there is neither; it lists the nearest names.
    """
    local = pathlib.Path(name if name.endswith(".py") else f"{name}.py")
    ours = recipe_path(name)
    if local.is_file():
        if ours and not name.endswith(".py") and not local.samefile(ours):
            _warn_of_local(f"{where}: the local file {local.resolve()}", name, ours)
        return local
    if ours:
        return ours
    if given := pathlib.Path(name) if name else None:
        if given.is_dir():
            raise ConfigError(
                f"{where}: {name} is a folder: name a recipe in it, such as {name}/NAME.py"
            )
        if given.exists():
            raise ConfigError(
                f"{where}: {name} is no recipe, which is a Python file whose name ends in .py; 'vit_jax recipes' lists "
                "those of the package"
            )
    raise ConfigError(
        f"{where}: there is no file {name}, nor a recipe of that name{_nearest(name)}"
    )


def require_recipe(name: str) -> pathlib.Path:
    """The file of a recipe that comes with the package. Raises `ConfigError`, with the nearest names."""
    if path := recipe_path(name):
        return path
    raise ConfigError(f"there is no recipe {name!r}{_nearest(name)}")


@functools.cache  # A command asks for its recipe more than once.
def _warn_of_local(local: str, name: str, ours: pathlib.Path) -> None:
    logging.warning(
        "%s is used, not the recipe %r of vit_jax; for that one set --config=%s", local, name, ours
    )


def _nearest(name: str) -> str:
    name = name.removeprefix("configs/").removesuffix(".py")
    close = difflib.get_close_matches(name, recipe_names(), n=_SHOWN, cutoff=0.5)
    maybe = f"; did you mean {' or '.join(map(repr, close))}?" if close else ";"
    return f"{maybe} 'vit_jax recipes' lists all"
