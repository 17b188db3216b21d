"""What TPUs compute their own way. They lay out an array's last axis in tiles of 128 and spend the
time of XLA's attention on passes over logits and on copies: so there tokens come last. The kernel
for short sequences is `tpu_attention.py`.
"""

import jax
import jax.numpy as jnp

from vit_jax.compute import choices, partitioning, recompute

# Under another name: `choices.by_platform` looks formulas up here.
from vit_jax.compute.dense import dense as affine
from vit_jax.compute.dense import product

# Length of a tile along the last axis; splash takes multiples of it.
LANES = 128


def project(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, implementation: str = "xla"
) -> tuple[jax.Array, ...]:
    """As products to H·C features, since axes smaller than a tile are padded. For plain attention
    they are of the kernel with the tokens, so that tokens are written last, as its products read
    them: the other order may need a copy. Pallas reads tokens in rows.
    """
    kernel = kernel.astype(x.dtype)
    _, count, heads, size = kernel.shape
    tokens = x.shape[1]
    chosen = choices.attention(
        implementation, queries=tokens, keys=tokens, heads=heads, head_size=size, dtype=x.dtype
    )
    kernels = [kernel[:, t].reshape(-1, heads * size) for t in range(count)]
    biases = [None] * count if bias is None else bias.astype(x.dtype).reshape(count, -1)

    def tokens_last(kernel, bias):
        y = jnp.tensordot(kernel, x, ((0,), (2,)))
        y = y if bias is None else y + bias[:, None, None]
        return y.reshape(heads, size, *x.shape[:2]).transpose(2, 3, 0, 1)

    def in_rows(kernel, bias):
        return affine(x, kernel, bias).reshape(*x.shape[:2], heads, size)

    own = in_rows if chosen == "short" else tokens_last
    return tuple(own(*both) for both in zip(kernels, biases, strict=True))


def weighted_sums(exponentials: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """With a column of ones beside the values: one product, in which padding leaves room for it, gives
    both sums.
    """
    ones = jnp.ones((*v.shape[:-1], 1), v.dtype)
    sums = product(
        "bhqn,bnhc->bqhc", exponentials.astype(v.dtype), jnp.concatenate([v, ones], axis=-1)
    )
    return sums[..., :-1], sums[..., -1].swapaxes(1, 2)


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
    """On one device. Tokens are padded to a multiple of 128; real ones see real ones only."""
    # Imported here: Pallas for TPUs takes a second to import.
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
        interpret=choices.platform() != "tpu",
    )
    real = (jnp.arange(padded) < tokens).astype(jnp.int32)
    segments = splash.SegmentIds(q=real, kv=real) if padding else None
    out = jax.vmap(run, in_axes=(0, 0, 0, None))(by_head(q), by_head(k), by_head(v), segments)
    return out[:, :, :tokens].swapaxes(1, 2).astype(v.dtype)
