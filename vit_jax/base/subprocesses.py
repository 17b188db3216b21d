"""Other Python processes that run a module of this package."""

import os
import pathlib
import sys

_PACKAGES = pathlib.Path(__file__).parents[2]  # the folder that has vit_jax


def python_module(name: str) -> tuple[list[str], dict[str, str]]:
    """The command that runs a module of this package, and its environment.

    The process imports what this one can, except from the current folder, which Python would search first: that may
    be full of files of strangers, and one called cv2.py is enough.

    Args:
      name: 'vit_jax.serving.decode_worker'.
    """
    current = os.path.realpath(os.curdir)
    folders = [folder for folder in sys.path if folder and os.path.realpath(folder) != current]
    folders.append(str(_PACKAGES))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(dict.fromkeys(folders))}
    return [sys.executable, "-P", "-m", name], environment
