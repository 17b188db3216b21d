"""How a model is computed on the devices at hand: what is chosen where the config leaves the choice,
and the sentence that tells it. What is computed is the same up to rounding; the implementations are
next door.

Choices are made while a program is traced, for the devices of the mesh that is set then: a program
compiled for a TPU pod on a laptop gets the TPU's.
"""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from vit_jax.compute import attend, partitioning

AUTO = -1  # of `unroll`

# Up to this many layers are unrolled on CPUs and GPUs; beyond, compiling takes longer than it saves.
UNROLLED = 24
# From here on the logits of all pairs of tokens cost more than the kernels' extra work. Not measured
# on accelerators yet: `tests/benchmarks/step_peers.py --device=cuda` compares the two.
CUDNN_TOKENS = 512
SPLASH_TOKENS = 2048


def unrolled(asked: int, layers: int, policy: str) -> int:
    """How many of `layers` equal layers are compiled side by side, `asked` being the config's
    `unroll`: 0 for all, `AUTO` for all on CPUs and GPUs. But for a loop on TPUs, whose compiler needs
    minutes for what is unrolled; and where a policy recomputes, since XLA for CPUs keeps what it shall
    recompute where forward and backward pass are not loops of their own.
    """
    if asked == AUTO:
        loop = partitioning.platform() == "tpu" or layers > UNROLLED or policy != "none"
        asked = 1 if loop else 0
    return min(asked or layers, layers)


def remat(config) -> str:
    """The policy of `recompute` for a model: `config.remat`, or for `auto` what suits the device. On
    CPUs a loop that stores few arrays beats layers side by side that store all, since it touches
    less memory; but for convolutions, of which it would store none.
    """
    if config.remat != "auto":
        return config.remat
    stores_few = partitioning.platform() == "cpu" and not config.convolutional
    return "save_products" if stores_few else "none"


def attention(asked: str, *, tokens: int, head_size: int, dtype) -> str:
    """The implementation of attention among tokens (see `attend`): `asked`, or for
    `auto` what suits device and shape.
    """
    if asked != "auto":
        return asked
    platform = partitioning.platform()
    halves = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    if platform in ("gpu", "cuda") and halves and head_size % 8 == 0 and head_size <= 128:
        return "cudnn" if tokens >= CUDNN_TOKENS else "xla"
    if platform == "tpu" and tokens >= SPLASH_TOKENS:
        return "splash"
    return "xla"


def cuts(asked: str, *, tokens: int) -> list[int]:
    """Where the tokens of a ViT are cut into parts, `asked` being the implementation of attention.

    A class token beside 16 × 16 patches makes 257, for which a TPU lays out, computes and moves
    3 × 128 wherever tokens are the last axis: the one token too many is a part of its own.
    """
    tail = tokens % attend.LANES
    pays = tokens > attend.LANES and 0 < tail <= attend.TAIL
    if partitioning.platform() != "tpu" or asked not in ("auto", "xla") or tokens >= SPLASH_TOKENS:
        return []
    return [tokens - tail] if pays else []


def computed(config):
    """The model's config with the type that it is computed in here.

    Without AMX, a CPU emulates bfloat16: products are taken in float32 anyway and rounded, which
    costs time and accuracy. So float32 is what such a CPU computes in, unless `dtype_on_cpu` says
    `same`.
    """
    if partitioning.platform() != "cpu" or config.dtype_on_cpu == "same":
        return config
    if config.dtype_on_cpu == "auto" and has_amx() and not config.convolutional:
        return config
    return dataclasses.replace(config, dtype="float32")


@functools.cache
def has_amx() -> bool:
    """Whether this machine's CPU multiplies matrices of bfloat16 (Intel AMX; known on Linux only)."""
    file = pathlib.Path("/proc/cpuinfo")
    return file.exists() and "amx_bf16" in file.read_text()


def told(config, mesh: Mesh) -> str:
    """All choices for a model on a mesh: 'attention: xla, layers: unrolled, remat: none, …'."""
    with jax.set_mesh(mesh):
        dtype = computed(config).dtype
        parts = []
        if hasattr(config, "heads"):
            size = config.width // config.heads
            kind = attention(config.attention, tokens=config.tokens, head_size=size, dtype=dtype)
            parts.append(f"attention: {kind}")
        depth = max((n for name, n in config.layers.items() if name.endswith("layers")), default=0)
        policy = remat(config)
        if depth:
            side_by_side = unrolled(config.unroll, depth, policy)
            layers = {1: "scanned", depth: "unrolled"}.get(
                side_by_side, f"{side_by_side} at a time"
            )
            parts += [f"layers: {layers}"]
    parts += [f"remat: {policy}", f"computed in: {dtype}"]
    if dtype != config.dtype:
        parts[-1] += (
            f" ({config.dtype} would be emulated; config.model.dtype_on_cpu=same insists on it)"
        )
    return ", ".join(parts)
