"""vit_jax: pre-train, fine-tune and inspect Vision Transformers in JAX and Flax.

    run = vit_jax.load_run("WORKDIR, FILE, hf://OWNER/NAME or a name of timm")
    run("cat.jpg").names                       # classes, best first
    vit_jax.train(vit_jax.load_config("digits"), "/tmp/digits")

The public names are loaded when first used, so that importing the package, and `vit_jax --help`,
cost nothing.
"""

import difflib
import importlib
from typing import TYPE_CHECKING

from vit_jax.devices import libtpu

if TYPE_CHECKING:
    from vit_jax.api import Run, load_run
    from vit_jax.base.errors import CheckpointError, ConfigError, UserError
    from vit_jax.config import default_config
    from vit_jax.data.record import BadImage, DataError
    from vit_jax.interchange.listing import list_models
    from vit_jax.interchange.loading import convert, create_model, load, load_weights
    from vit_jax.prediction.predict import Prediction
    from vit_jax.prediction.transform import Transform
    from vit_jax.recipes.user_files import load_config
    from vit_jax.training.loop import train

__version__ = "0.2.0"
__all__ = [
    "BadImage",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Prediction",
    "Run",
    "Transform",
    "UserError",
    "convert",
    "create_model",
    "default_config",
    "list_models",
    "load",
    "load_config",
    "load_run",
    "load_weights",
    "train",
]

_MODULES = {
    "BadImage": "vit_jax.data.record",
    "CheckpointError": "vit_jax.base.errors",
    "ConfigError": "vit_jax.base.errors",
    "DataError": "vit_jax.data.record",
    "Prediction": "vit_jax.prediction.predict",
    "Transform": "vit_jax.prediction.transform",
    "UserError": "vit_jax.base.errors",
    "convert": "vit_jax.interchange.loading",
    "create_model": "vit_jax.interchange.loading",
    "default_config": "vit_jax.config",
    "list_models": "vit_jax.interchange.listing",
    "load": "vit_jax.interchange.loading",
    "load_config": "vit_jax.recipes.user_files",
    "load_weights": "vit_jax.interchange.loading",
    "train": "vit_jax.training.loop",
}
# What commands do that no public function of their name does.
_METHODS = {
    "evaluate": "evaluate(DATA)", "export": "export(FILE)", "features": "features(IMAGES)", "predict": "(IMAGES)",
    "preprocess": "preprocess(IMAGES)", "push": "push('OWNER/NAME')", "save": "save(PATH)",
    "segment": "segment(IMAGES)", "transform": "transform(IMAGE)",
}  # fmt: skip
_COMMANDS = (
    "benchmark",
    "inspect",
    "launch",
    "merge",
    "plan",
    "prepare",
    "report",
    "serve",
    "show",
    "sweep",
)


libtpu.silence_logs()


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}{_pointer(name)}")
    return getattr(importlib.import_module(_MODULES.get(name, "vit_jax.api")), name)


def _pointer(name: str) -> str:
    """What to use in place of a name that is not there; '' if nothing is like it."""
    if name in _METHODS:
        return f": run = vit_jax.load_run(CHECKPOINT); run{'' if name == 'predict' else '.'}{_METHODS[name]}"
    if name in _COMMANDS:
        return f": it is a command, 'vit_jax {name} --help'"
    close = difflib.get_close_matches(name, __all__, n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
