"""How a model is computed on the devices at hand: what is chosen where the config leaves the choice,
and the sentence that reports it. Only this file, and those that implement formulas for one platform,
depend on the platform. What is computed is the same up to rounding.

Choices are made while a program is traced, for the devices of the mesh that is set then: a program
compiled for a TPU pod on a laptop gets the TPU's.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.base.errors import ConfigError
from vit_jax.base.patterns import STACK
from vit_jax.compute import gpu, platform, tpu_attention

AUTO = -1  # of `unroll`

# Up to this many layers are unrolled on CPUs; beyond, compiling takes longer than it saves.
UNROLLED = 24
# From this many tokens N on, a GPU computes attention by cuDNN. Counted, not measured: plain XLA
# writes and reads a head's logits in float32 and weights in 16 bits, 12 N² bytes a forward pass; the
# fused kernel reads and writes q, k, v and the result, 8 N C bytes. Heads of C = 64 are even at 43
# tokens, and at 197 plain XLA moves 4.6 times as much. The kernel works in tiles of 128 tokens, which
# fewer do not fill. `tests/benchmarks/step_peers.py --device=cuda` compares the two.
CUDNN_TOKENS = 128
SPLASH_TOKENS = 2048


class ComputeOptions(Protocol):
    """The options of a model that choices depend on; every family's config has them."""

    convolutional: ClassVar[bool]
    layers: Mapping[str, Any]
    dtype: str
    dtype_on_cpu: str
    remat: str
    unroll: int


Model = TypeVar("Model", bound=ComputeOptions)


def attention(
    asked: str,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    dtype: jax.typing.DTypeLike,
    biased: bool = False,
) -> str:
    """The implementation of attention (see `attend`): `asked`, or for `auto` what suits device and
    shape. The kernels need as many queries as keys; without that plain XLA is used, whatever was
    asked for.

    Args:
      asked: one of `attend.IMPLEMENTATIONS`.
      queries, keys: how many tokens attend, and to how many.
      heads: how many.
      head_size, dtype: of queries and keys.
      biased: whether a bias is added to the logits, which the kernels cannot do.

    Raises:
      ConfigError: a kernel is asked for that cannot compute this, or not on these devices.
    """
    if biased and asked not in ("auto", "xla"):
        raise ConfigError(
            f"model.attention={asked} cannot add a bias to the attention logits: take auto or xla"
        )
    if asked == "cudnn" and platform.current() != "gpu":
        raise ConfigError(
            f"config.model.attention=cudnn needs a GPU, and this is computed on a {platform.current().upper()}: "
            "take auto or xla"
        )
    short = tpu_attention.fits(keys, heads, head_size, dtype)
    if asked == "short" and not short and queries == keys:
        sizes = ", ".join(map(str, tpu_attention.HEAD_SIZES))
        raise ConfigError(
            f"config.model.attention=short takes {tpu_attention.TOKENS[0]} to {tpu_attention.TOKENS[-1]} "
            f"tokens and heads of {sizes} channels that fit a device's fast memory, and got "
            f"{keys} tokens and {heads} heads of {head_size}: set auto or xla"
        )
    if biased or queries != keys:
        return "xla"
    if asked != "auto":
        return asked
    if platform.current() == "gpu" and not platform.is_amd():
        fits = head_size % 8 == 0 and head_size <= 128
        halves = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
        return "cudnn" if fits and halves and keys >= CUDNN_TOKENS else "xla"
    if platform.current() == "tpu":
        return "short" if short else "splash" if keys >= SPLASH_TOKENS else "xla"
    return "xla"


def unrolled(asked: int, layers: int, policy: str) -> int:
    """How many of `layers` equal layers are compiled side by side. `asked` is the config's
    `unroll`: 0 for all; `AUTO` for one at a time, but all on CPUs, unless there are more than
    `UNROLLED` or a policy recomputes: XLA for CPUs stores what it should recompute unless forward and
    backward pass are loops of their own. The compiler for TPUs needs minutes for unrolled layers;
    what that for GPUs needs was never measured.
    """
    if asked == AUTO:
        loop = platform.current() != "cpu" or layers > UNROLLED or policy != "none"
        asked = 1 if loop else 0
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
    return gpu.COMPILER_OPTIONS if mesh.devices.flat[0].platform == "gpu" else {}


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


@functools.cache
def multiplies_bfloat16() -> bool:
    """Whether this machine's CPU has instructions for products in bfloat16, AMX or AVX-512 BF16 (known
    on Linux only).
    """
    file = pathlib.Path("/proc/cpuinfo")
    flags = file.read_text().split() if file.exists() else []
    return "amx_bf16" in flags or "avx512_bf16" in flags


def summarize(config: ComputeOptions, mesh: Mesh) -> str:
    """All choices for a model on a mesh: 'attention: xla, layers: unrolled, remat: none, …'."""
    with jax.set_mesh(mesh):
        dtype = with_compute_dtype(config).dtype
        phrases = []
        if hasattr(config, "attention"):
            kind = attention(
                config.attention,
                queries=config.tokens,
                keys=config.tokens,
                heads=config.heads,
                head_size=config.width // config.heads,
                dtype=dtype,
                biased=config.biased_attention,
            )
            phrases.append(f"attention: {kind}")
        policy = remat(config)
        depth = max(_stacks(config.layers), default=0)
        if depth:
            count = unrolled(config.unroll, depth, policy)
            how = {1: "scanned", depth: "unrolled"}.get(count, f"{count} at a time")
            phrases.append(f"layers: {how}")
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
