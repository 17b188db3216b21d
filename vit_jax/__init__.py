"""vit_jax: pre-train, fine-tune and inspect Vision Transformers in JAX and Flax.

    run = vit_jax.load_run("WORKDIR, FILE, hf://OWNER/NAME or a name of timm")
    run("cat.jpg").names                       # classes, best first
    vit_jax.train(vit_jax.load_config("digits"), "/tmp/digits")

The public names are loaded when first used, so that importing the package, and `vit_jax --help`,
cost nothing.
"""

import importlib
from typing import TYPE_CHECKING

from vit_jax.devices import libtpu

if TYPE_CHECKING:
    from vit_jax.api import Run, create_model, list_models, load_run
    from vit_jax.config import default_config
    from vit_jax.interchange.loading import convert, load, load_weights
    from vit_jax.prediction.predict import Prediction
    from vit_jax.recipes.user_files import load_config
    from vit_jax.training.loop import train

__version__ = "0.2.0"
__all__ = [
    "Prediction",
    "Run",
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
    "Prediction": "vit_jax.prediction.predict",
    "convert": "vit_jax.interchange.loading",
    "default_config": "vit_jax.config",
    "load": "vit_jax.interchange.loading",
    "load_config": "vit_jax.recipes.user_files",
    "load_weights": "vit_jax.interchange.loading",
    "train": "vit_jax.training.loop",
}


libtpu.silence_logs()


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES.get(name, "vit_jax.api")), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
