"""What GPUs compute their own way, and how XLA compiles for them. Memory that is set aside for a run is
in `devices/gpus.py`.
"""

import jax
import jax.numpy as jnp

# What differs from XLA's defaults, of a program that trains. Few, since none could be measured here:
# - Collectives run beside products instead of between them. NVIDIA's own JAX images set it.
# Nothing of NCCL is set: it chooses protocols and buffers by the network that it finds.
COMPILER_OPTIONS = {"xla_gpu_enable_latency_hiding_scheduler": True}


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q kᵀ) v by cuDNN's fused attention; shapes as in `attend.attend`, float16 or bfloat16.

    JAX refuses odd token counts when training: one is added, which the lengths mask.
    """
    tokens = q.shape[1]
    lengths = None
    if tokens % 2:
        q, k, v = (jnp.pad(x, ((0, 0), (0, 1), (0, 0), (0, 0))) for x in (q, k, v))
        lengths = jnp.full(q.shape[0], tokens, jnp.int32)
    out = jax.nn.dot_product_attention(
        q, k, v, scale=1.0, implementation="cudnn",
        query_seq_lengths=lengths, key_value_seq_lengths=lengths,
    )  # fmt: skip
    return out[:, :tokens]
