"""vit_jax: pre-train, fine-tune and inspect Vision Transformers in JAX and Flax.

The public names are loaded when first used, so that importing the package, and `vit_jax --help`,
cost nothing.
"""

import importlib

from vit_jax.devices import libtpu

__version__ = "0.1.0"

_PUBLIC = {
    "create_model": "vit_jax.models.registry",
    "train": "vit_jax.training.loop",
    "load": "vit_jax.interchange.loading",
    "load_weights": "vit_jax.interchange.loading",
    "load_run": "vit_jax.interchange.loading",
    "default_config": "vit_jax.config",
    "load_config": "vit_jax.user_files",
}


libtpu.silence_logs()


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'vit_jax' has no attribute {name!r}")
    return getattr(importlib.import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted([*_PUBLIC, "__version__"])
