"""Splash attention (Pallas), for long sequences on TPUs."""

import jax
import jax.numpy as jnp

from vit_jax.compute import partitioning, platform, recompute

BLOCK = 512  # tokens of a block: sequences are padded to whole ones, which takes less than shorter blocks do


def splash(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """softmax(q kᵀ) v by splash attention (Pallas).

    Args:
      q, k, v: (B, N, H, C).
      lengths: (B,) int32, at least 1: how many leading keys of each image count. Others have weight 0, and
        their gradients and those of their values are 0.
    """
    given = [] if lengths is None else [lengths]
    (out,) = partitioning.per_device(
        lambda *arrays: (_splash(*arrays),),
        q,
        k,
        v,
        *given,
        heads=q.shape[2],
        axes=[2, 2, 2, *(None for _ in given)],
        out_axes=(2,),
    )
    return out


def _splash(q, k, v, lengths=None):
    """On one device. Tokens are padded to whole blocks, and what was added is seen by none."""
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
    axis = None if lengths is None else 0
    segments = None
    if padding or lengths is not None:
        counts = jnp.arange(padded) < (tokens if lengths is None else lengths[:, None])
        segments = splash.SegmentIds(
            q=jnp.ones_like(counts, jnp.int32), kv=counts.astype(jnp.int32)
        )
    out = jax.vmap(run, in_axes=(0, 0, 0, axis))(by_head(q), by_head(k), by_head(v), segments)
    return out[:, :, :tokens].swapaxes(1, 2).astype(v.dtype)
