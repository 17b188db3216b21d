"""Where and with what a figure was measured."""

import importlib.metadata
import platform

import jax

from vit_jax.devices import local


def context() -> dict:
    """Where and with what a figure was measured."""
    device = jax.devices()[0]
    return {
        "devices": f"{jax.device_count()} x {device.device_kind}",
        "cpu_cores": local.cores(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "flax": importlib.metadata.version("flax"),
    }
