"""How a model is computed on the devices at hand: what is chosen where the config leaves the choice,
and the sentence that reports it. Attention's kernel is chosen in `attend`. Only these two, and the files that
implement formulas for one platform, depend on the platform. What is computed is the same up to rounding.

Choices are made while a program is traced, for the devices of the mesh that is set then: a program
compiled for a TPU pod on a laptop gets the TPU's.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import jax
from jax.sharding import Mesh

from vit_jax.base.lazy_table import LazyTable
from vit_jax.base.patterns import STACK
from vit_jax.compute import platform

AUTO = -1  # of `unroll`

# Up to this many layers are unrolled; beyond, compiling takes longer than it saves. The compiler for TPUs needs minutes
# for unrolled layers. On GPUs a loop moves two thirds more bytes, to and from stacks of activations.
UNROLLED = {"cpu": 24, "gpu": 48}

COMPILER_OPTIONS: LazyTable[dict[str, bool]] = LazyTable(
    {
        "gpu": "vit_jax.compute.gpu:COMPILER_OPTIONS",
        "tpu": "vit_jax.compute.tpu:COMPILER_OPTIONS",
    }
)


class ComputeOptions(Protocol):
    """The options of a model that choices depend on; every family's config has them."""

    convolutional: ClassVar[bool]
    layers: Mapping[str, Any]
    dtype: str
    dtype_on_cpu: str
    remat: str
    unroll: int


Model = TypeVar("Model", bound=ComputeOptions)


def unrolled(asked: int, layers: int, policy: str) -> int:
    """How many of `layers` equal layers are compiled side by side. `asked` is the config's
    `unroll`: 0 for all; `AUTO` for all up to `UNROLLED`, else one at a time. On CPUs also one at a time if a policy
    recomputes: XLA for CPUs stores what it should recompute unless forward and backward pass are loops of their own.
    """
    if asked == AUTO:
        own = platform.current()
        most = 1 if own == "cpu" and policy != "none" else UNROLLED.get(own, 1)
        asked = 0 if layers <= most else 1
    return min(asked or layers, layers)


def remat(config: ComputeOptions) -> str:
    """The policy of `recompute` for a model: the config's, or for `auto` what suits the device.

    On CPUs and TPUs a loop that stores few arrays beats one that stores all, since it touches less
    memory; except for convolutions, whose outputs it would not store. Measured on CPUs; of TPUs by
    the compiler's cycles, which docs/notes/2026-11-23-families-on-tpus.md lists by family.
    """
    if config.remat != "auto":
        return config.remat
    stores_few = platform.current() in ("cpu", "tpu") and not config.convolutional
    return "save_products" if stores_few else "none"


def compiler_options(mesh: Mesh) -> dict[str, bool]:
    """XLA's options for a program that trains on the devices of a mesh."""
    return COMPILER_OPTIONS.get(mesh.devices.flat[0].platform, {})


def with_compute_dtype(config: Model) -> Model:
    """The model's config with the dtype that it is computed in on these devices.

    Without instructions for it, a CPU emulates bfloat16: products are taken in float32 anyway and
    rounded, which costs time and accuracy. So such a CPU computes in float32, unless `dtype_on_cpu`
    says `same`.
    """
    if platform.current() != "cpu" or config.dtype_on_cpu == "same":
        return config
    if config.dtype_on_cpu == "auto" and multiplies_bfloat16() and not config.convolutional:
        return config
    return dataclasses.replace(config, dtype="float32")


def checker_options(mesh: Mesh) -> dict[str, bool | int]:
    """XLA's options for a program that finds wrong results by computing everything twice; empty where the platform
    has none.
    """
    device = mesh.devices.flat[0]
    if device.platform != "tpu":
        return {}
    from vit_jax.compute import tpu

    return tpu.checker_options(device.device_kind)


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products in bfloat16, AMX or AVX-512 BF16 (known
    on Linux only).
    """
    return bool({"amx_bf16", "avx512_bf16"} & cpu_instructions())


@functools.cache
def cpu_instructions() -> frozenset[str]:
    """The names that Linux has for what this machine's CPU has, 'avx512_vnni'; none on other systems."""
    file = pathlib.Path("/proc/cpuinfo")
    return frozenset(file.read_text().split() if file.exists() else ())


def summarize(config: ComputeOptions, mesh: Mesh, attention: Iterable[str] = ()) -> str:
    """All choices for a model on a mesh: 'attention: xla, layers: unrolled, remat: none, …'.

    Args:
      attention: the implementations in the program, which `attend.record` collected while it was traced.
    """
    with jax.set_mesh(mesh):
        dtype = with_compute_dtype(config).dtype
        phrases = [f"attention: {' and '.join(attention)}"] if attention else []
        policy = remat(config)
        depth = max(_stacks(config.layers), default=0)
        if depth:
            count = unrolled(config.unroll, depth, policy)
            form = {1: "scanned", depth: "unrolled"}.get(count, f"{count} at a time")
            phrases.append(f"layers: {form}")
    phrases += [f"remat: {policy}", f"computed in: {dtype}"]
    if dtype != config.dtype:
        phrases[-1] += (
            f" ({config.dtype} would be emulated; set config.model.dtype_on_cpu=same to compute in it)"
        )
    return ", ".join(phrases)


def _stacks(layers: Mapping[str, Any]) -> Iterator[int]:
    """How many layers each stack has, as `layers` of a family's config lists them."""
    for name, count in layers.items():
        if isinstance(count, Mapping):
            yield from _stacks(count)
        elif name.endswith(STACK):
            yield count
