"""Splash attention (Pallas), for long sequences on TPUs."""

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning, platform, recompute

BLOCK = 512  # tokens of a block: sequences are padded to whole ones, which takes less than shorter blocks do


def splash(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """softmax(q kᵀ) v by splash attention (Pallas); shapes as in `attend.attend`."""
    (out,) = partitioning.per_device(
        lambda *arrays: (_splash(*arrays),),
        q,
        k,
        v,
        heads=q.shape[2],
        axes=(2, 2, 2),
        out_axes=(2,),
    )
    return out


def _splash(q, k, v):
    """On one device. Tokens are padded to whole blocks; real ones see real ones only."""
    # Imported here: Pallas for TPUs takes a second to import.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
    )
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_mask as masks,
    )

    tokens, heads = q.shape[1:3]
    padding = -tokens % BLOCK
    padded = tokens + padding

    def by_head(x):
        return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, padding), (0, 0)))

    run = splash.make_splash_mha(
        masks.MultiHeadMask([masks.FullMask((padded, padded))] * heads),
        block_sizes=splash.BlockSizes(*[BLOCK] * 8),
        head_shards=1,
        q_seq_shards=1,
        residual_checkpoint_name=recompute.ATTENTION,
        interpret=platform.current() != "tpu",
    )
    real = (jnp.arange(padded) < tokens).astype(jnp.int32)
    segments = splash.SegmentIds(q=real, kv=real) if padding else None
    out = jax.vmap(run, in_axes=(0, 0, 0, None))(by_head(q), by_head(k), by_head(v), segments)
    return out[:, :, :tokens].swapaxes(1, 2).astype(v.dtype)
