"""The platform that a program is traced for, and the choice between a plain formula and the
platform's own implementation of it.
"""

import functools
import importlib
from collections.abc import Callable

import jax

IMPLEMENTATIONS = {
    "cpu": "vit_jax.compute.cpu",
    "gpu": "vit_jax.compute.gpu",
    "tpu": "vit_jax.compute.tpu",
}


def current() -> str:
    """The platform of the program being traced, `cpu`, `gpu` or `tpu`: that of the mesh that is set,
    or JAX's default.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    name = jax.default_backend() if device is None else device.platform
    return "gpu" if name == "cuda" else name


def device_kind() -> str:
    """What JAX calls the devices of the mesh that is set, or its default ones: 'TPU v5 lite'."""
    return (jax.sharding.get_abstract_mesh().abstract_device or jax.devices()[0]).device_kind


def is_amd() -> bool:
    """Whether the GPUs are AMD's, which have no cuDNN."""
    return device_kind().startswith("AMD")


def by_platform(formula: Callable) -> Callable:
    """Decorates a plain formula that platforms may implement their own way.

    The result has two attributes: `on(platform)` is a decorator that registers an implementation,
    and `plain` is the formula itself, which is computed on all other platforms.

    Example:

        @by_platform
        def product(a, b): ...

        @product.on("cpu")
        def product_on_cpus(a, b): ...
    """
    implementations = {}

    @functools.wraps(formula)
    def dispatched(*arguments, **options):
        platform = current()
        _register_all(platform)
        return implementations.get(platform, formula)(*arguments, **options)

    def on(platform: str) -> Callable:
        def register(implementation: Callable) -> Callable:
            implementations[platform] = implementation
            return implementation

        return register

    dispatched.plain, dispatched.on = formula, on
    return dispatched


@functools.cache
def _register_all(platform: str) -> None:
    """Imports the file with the implementations for a platform, which registers them."""
    if platform in IMPLEMENTATIONS:
        importlib.import_module(IMPLEMENTATIONS[platform])
