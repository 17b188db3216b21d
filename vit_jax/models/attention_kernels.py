"""softmax(q kᵀ) v, one formula in three implementations that give the same: plain XLA, cuDNN's fused
attention on GPUs, splash attention (Pallas) on TPUs. Which is taken, `execution` chooses; projections
and dropout are in `attention`.

q (B, Q, H, C) is scaled already; k and v are (B, N, H, C); the result is (B, Q, H, C) in the dtype of
v. Softmax is in float32 and sums are accumulated in it. The backward pass keeps the result and the
logarithm of the softmax's denominator, named `SAVED` for `remat`, and recomputes the weights from
them (FlashAttention, arXiv 2205.14135 §3): half the memory of keeping them, and fewer passes over it.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax import parallel
from vit_jax.models.products import product

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
SAVED = "attention"
# Rows that a TPU works on at once: splash takes multiples of it.
LANES = 128


def attend(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> jax.Array:
    """softmax(q kᵀ) v by one of `xla`, `cudnn`, `splash`."""
    return {"xla": _xla, "cudnn": _cudnn, "splash": _splash}[implementation](q, k, v)


def weights(q: jax.Array, k: jax.Array) -> jax.Array:
    """softmax(q kᵀ): (B, H, Q, N) in the dtype of q."""
    return jax.nn.softmax(_logits(q, k)).astype(q.dtype)


@jax.custom_vjp
def _xla(q, k, v):
    return _xla_forward(q, k, v)[0]


def _xla_forward(q, k, v):
    logits = _logits(q, k)
    largest = logits.max(-1, keepdims=True)
    exponentials = jnp.exp(logits - largest)
    total = exponentials.sum(-1)
    out = product("bhqn,bnhc->bqhc", exponentials.astype(v.dtype), v)
    # Dividing here touches C numbers for each query instead of N.
    out = (out / total.swapaxes(1, 2)[..., None]).astype(v.dtype)
    out = checkpoint_name(out, SAVED)
    log_total = checkpoint_name(largest[..., 0] + jnp.log(total), SAVED)
    return out, (q, k, v, out, log_total)


def _xla_backward(saved, gradient):
    q, k, v, out, log_total = saved
    p = jnp.exp(_logits(q, k) - log_total[..., None])
    of_v = product("bhqn,bqhc->bnhc", p.astype(v.dtype), gradient)
    of_p = product("bqhc,bnhc->bhqn", gradient, v)
    mean = product("bqhc,bqhc->bhq", gradient, out)
    of_logits = (p * (of_p - mean[..., None])).astype(q.dtype)
    of_q = product("bhqn,bnhc->bqhc", of_logits, k)
    of_k = product("bhqn,bqhc->bnhc", of_logits, q)
    return of_q.astype(q.dtype), of_k.astype(k.dtype), of_v.astype(v.dtype)


_xla.defvjp(_xla_forward, _xla_backward)


def _cudnn(q, k, v):
    """JAX refuses odd token counts when training: one is added, which the lengths say is none."""
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


def _splash(q, k, v):
    return parallel.per_device(_splash_on_a_device, q, k, v)


def _splash_on_a_device(q, k, v):
    """Tokens are padded to a multiple of 128; real ones see real ones only."""
    # Imported here: Pallas for TPUs takes a second that nobody else should wait.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    tokens, heads = q.shape[1:3]
    padding = -tokens % LANES
    padded = tokens + padding

    def by_head(x):
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))

    block = max(size for size in (512, 384, 256, 128) if padded % size == 0)
    run = splash.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((padded, padded))] * heads),
        block_sizes=splash.BlockSizes(*[block] * 8),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=SAVED,
        interpret=parallel.platform() != "tpu",
    )
    real = (jnp.arange(padded) < tokens).astype(jnp.int32)
    segments = splash.SegmentIds(q=real, kv=real) if padding else None
    out = jax.vmap(run, in_axes=(0, 0, 0, None))(by_head(q), by_head(k), by_head(v), segments)
    return out[:, :, :tokens].swapaxes(1, 2).astype(v.dtype)


def _logits(q, k):
    return product("bqhc,bnhc->bhqn", q, k)
