"""timm's models and lightly's losses without torchvision: they need nothing of it, but their packages import it,
and it is not installed everywhere, nor does each build of it fit PyTorch's for CPUs.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType


def timm_models() -> ModuleType:
    """`timm.models`."""
    return imported("timm.models")


def imported(name: str) -> ModuleType:
    """The module of this name."""
    sys.meta_path.insert(0, StubFinder())
    try:
        return importlib.import_module(name)
    finally:
        # Gone again, lest others take the stubs for the package.
        sys.meta_path.pop(0)
        for stub in [stub for stub in sys.modules if stub.split(".")[0] == "torchvision"]:
            del sys.modules[stub]


class Anything(type):
    """A class that has every attribute: each one more such class."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision` and all modules below, every name in which does nothing."""

    def find_spec(self, name, path, target=None):
        if name.split(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def exec_module(self, module):
        module.__getattr__ = lambda name: getattr(Anything("torchvision", (), {}), name)
