"""softmax(q kᵀ) v, one formula in three implementations that give the same: plain XLA, cuDNN's fused
attention on GPUs, splash attention (Pallas) on TPUs. Which is taken, `choices` says; projections
and dropout are in `models.attention`.

q (B, Q, H, C) is scaled already; k and v are (B, N, H, C); the result is (B, Q, H, C) in the dtype of
v. Softmax is in float32 and sums are accumulated in it. The backward pass keeps the result and the
logarithm of the softmax's denominator, named for `remat`, and recomputes the weights from
them (FlashAttention, arXiv 2205.14135 §3): half the memory of keeping them, and fewer passes over it.

On TPUs plain XLA spends its time on passes over the logits, whose last axis lies in tiles of 128:
hence tokens in parts, and what `_weighted` does.
"""

import functools

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning, recompute
from vit_jax.compute.dense import product

IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
# A TPU lays out the last axis in tiles of this length; splash takes multiples of it.
LANES = 128
# Tokens that are a part of their own rather than the beginning of another tile: rows of a tile.
TAIL = 8

Parts = tuple[jax.Array, ...]


def attend(q: jax.Array, k: jax.Array, v: jax.Array, implementation: str) -> jax.Array:
    """softmax(q kᵀ) v by one of `xla`, `cudnn`, `splash`."""
    if implementation == "xla":
        return attend_in_parts((q,), (k,), (v,))[0]
    return {"cudnn": _cudnn, "splash": _splash}[implementation](q, k, v)


def weights(q: jax.Array, k: jax.Array) -> jax.Array:
    """softmax(q kᵀ): (B, H, Q, N) in the dtype of q."""
    return jax.nn.softmax(_logits(q, k)).astype(q.dtype)


@jax.custom_vjp
def attend_in_parts(qs: Parts, ks: Parts, vs: Parts) -> Parts:
    """softmax(q kᵀ) v of tokens in parts, by plain XLA: every query sees the keys of all parts.

    Args:
      qs, ks, vs: a (B, N_i, H, C) for each part.

    Returns:
      The same of the result.
    """
    return _forward(qs, ks, vs)[0]


def _forward(qs, ks, vs):
    outs, log_totals, kept = [], [], []
    for q in qs:
        logits = [_logits(q, k) for k in ks]
        kept.append([_small(x) for x in logits])
        largest = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in logits])
        sums = [_weighted(jnp.exp(x - largest), v) for x, v in zip(logits, vs, strict=True)]
        out, total = (sum(of_parts) for of_parts in zip(*sums, strict=True))
        # Dividing here touches C numbers for each query instead of N.
        out = (out / total.swapaxes(1, 2)[..., None]).astype(q.dtype)
        outs.append(recompute.named(out, recompute.ATTENTION))
        log_totals.append(recompute.named(largest[..., 0] + jnp.log(total), recompute.ATTENTION))
    return tuple(outs), (qs, ks, vs, outs, log_totals, kept)


def _backward(saved, gradients):
    qs, ks, vs, outs, log_totals, kept = saved
    of_qs, of_ks, of_vs = [0] * len(qs), [0] * len(ks), [0] * len(vs)
    for i, (q, out, log_total, gradient) in enumerate(
        zip(qs, outs, log_totals, gradients, strict=True)
    ):
        mean = product("bqhc,bqhc->bhq", gradient, out)[..., None]
        for j, (k, v) in enumerate(zip(ks, vs, strict=True)):
            logits = _logits(q, k) if kept[i][j] is None else kept[i][j]
            p = jnp.exp(logits - log_total[..., None])
            of_p = product("bqhc,bnhc->bhqn", gradient, v)
            of_logits = (p * (of_p - mean)).astype(q.dtype)
            of_qs[i] += product("bhqn,bnhc->bqhc", of_logits, k).astype(q.dtype)
            of_ks[j] += product("bhqn,bqhc->bnhc", of_logits, q).astype(k.dtype)
            of_v = product("bhqn,bqhc->bnhc", p.astype(v.dtype), gradient)
            of_vs[j] += of_v.astype(v.dtype)
    return tuple(of_qs), tuple(of_ks), tuple(of_vs)


attend_in_parts.defvjp(_forward, _backward)


def _small(logits: jax.Array) -> jax.Array | None:
    """Logits (B, H, Q, N) of a part that is a few tokens: keeping them takes less than reading all
    queries or keys again.
    """
    return recompute.named(logits, recompute.ATTENTION) if min(logits.shape[-2:]) <= TAIL else None


def _weighted(exponentials: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the keys: of the values (B, Q, H, C) and of the exponentials (B, H, Q), in float32."""
    if partitioning.platform() != "tpu":
        out = product("bhqn,bnhc->bqhc", exponentials.astype(v.dtype), v)
        return out, exponentials.sum(-1)
    # A column of ones beside the values: one product, for which the padding of C has room, gives both.
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    out = product(
        "bhqn,bnhc->bqhc", exponentials.astype(v.dtype), jnp.concatenate([v, ones], axis=-1)
    )
    return out[..., :-1], out[..., -1].swapaxes(1, 2)


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
    return partitioning.per_device(_splash_on_a_device, q, k, v)


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
        residual_checkpoint_name=recompute.ATTENTION,
        interpret=partitioning.platform() != "tpu",
    )
    real = (jnp.arange(padded) < tokens).astype(jnp.int32)
    segments = splash.SegmentIds(q=real, kv=real) if padding else None
    out = jax.vmap(run, in_axes=(0, 0, 0, None))(by_head(q), by_head(k), by_head(v), segments)
    return out[:, :, :tokens].swapaxes(1, 2).astype(v.dtype)


def _logits(q, k):
    return product("bqhc,bnhc->bhqn", q, k)
