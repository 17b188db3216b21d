"""cuDNN's fused attention on NVIDIA GPUs, by JAX's primitives under a rule of our own.

What JAX's own rule, `jax.nn.dot_product_attention`, does not do for us:
- It refuses odd token counts in training, such as the 197 of a ViT (docs/notes/2026-11-24-gpu-programs.md has why),
  so that queries, keys and values would have to be copied to an even count.
- The result and the logarithms of the softmax's denominators have no names in it, so that `remat` computes
  attention twice.
- It asks which GPU is installed while a program is traced, which a plan made on a laptop cannot answer.
"""

import inspect
import os
import re

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.compute import partitioning, platform, recompute
from vit_jax.devices import gpus

# The kernels' tile of keys. Where tokens do not fill the last one, backward kernels have given NaN for logits far
# below zero, unless they get the lengths (NVIDIA/cudnn-frontend#160, pytorch/pytorch#196678).
TILE = 128
# Of compute capability below 8.0, on which the kernels do not run.
_BEFORE_AMPERE = re.compile(r"\b(K80|P100|P40?|V100|T4|GTX|TITAN|Quadro|RTX 20\d\d)\b")
_HOPPER = re.compile(r"\b(H100|H200|H800|H20|GH200)\b")


def fits(head_size: int, dtype: jax.typing.DTypeLike) -> bool:
    """Whether the kernels take such heads on the GPUs of the mesh that is set, as `config.deterministic` has it."""
    kind = platform.device_kind()
    if platform.is_amd() or _BEFORE_AMPERE.search(kind) or gpus.is_deterministic(os.environ):
        return False
    largest = 256 if _HOPPER.search(kind) else 128
    halves = jnp.dtype(dtype) in (jnp.bfloat16, jnp.float16)
    return halves and head_size % 8 == 0 and head_size <= largest


@jax.custom_vjp
def fused_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None
) -> jax.Array:
    """softmax(q kᵀ / √C) v; all (B, N, H, C), float16 or bfloat16; `lengths` as in `attend.attend`."""
    (out,) = _call("fwd", lengths, q, k, v, is_training=False)
    return out


def _forward(q, k, v, lengths):
    out, logsumexp = _call("fwd", lengths, q, k, v, is_training=True)
    out = recompute.named(out, recompute.ATTENTION)
    logsumexp = recompute.named(logsumexp, recompute.ATTENTION)
    return out, (q, k, v, lengths, out, logsumexp)


def _backward(saved, dout):
    if gpus.is_deterministic(os.environ):
        raise ConfigError(
            "config.deterministic=True with config.model.attention=cudnn: XLA does not find the backward kernel that "
            "it has compiled for that (openxla/xla#46500); set attention to auto, which takes xla then"
        )
    q, k, v, lengths, out, logsumexp = saved
    return *_call("bwd", lengths, q, k, v, logsumexp, out, dout), None


fused_attention.defvjp(_forward, _backward)


def _call(direction: str, lengths, q, k, v, *saved, **options) -> list[jax.Array]:
    """One of JAX's two primitives, whose operands and options have no public name."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    unused = jnp.zeros(0, q.dtype)
    masked = lengths is not None or (direction == "bwd" and q.shape[1] % TILE)
    mask = fused.MaskType.PADDING if masked else fused.MaskType.NO_MASK
    queries = keys = unused
    if masked:
        # All queries count: rows beyond their number would be left as they were in memory.
        queries = partitioning.constrain_batch(jnp.full(q.shape[0], q.shape[1], jnp.int32))
        keys = queries if lengths is None else partitioning.constrain_batch(lengths)
    primitive = {
        "fwd": fused._dot_product_attention_fwd_p_wrapper,
        "bwd": fused._dot_product_attention_bwd_p_wrapper,
    }[direction]
    # Bias; lengths of queries and keys; offsets of packed ones; tables of pages.
    operands = unused, queries, keys, unused, unused, unused, unused
    if "score_mod" in inspect.signature(fused._dot_product_attention_fwd_rule).parameters:
        options["score_mod"] = None  # since JAX 0.12
    return primitive.bind(
        q, k, v, *operands, *saved,
        scale=q.shape[-1] ** -0.5, seed=42, dropout_rate=0.0, variadic_args=(False, False), mask_type=mask,
        layout=fused.AttentionLayout.BTNH.value, sliding_window_length=None, **options,
    )  # fmt: skip
