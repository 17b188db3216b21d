"""Attention: tokens projected to heads, softmax(q kᵀ / √C + bias) v of each head (ViT Eq. 6 and 7), and
heads projected back.

Heads are (B, N, H, C), or several such in parts (see `tokens`). Softmax is in float32, and sums are
accumulated in it.
"""

import functools

import jax
import jax.numpy as jnp

from vit_jax.compute import choices, gpu, recompute, tokens, tpu
from vit_jax.compute.dense import dense, product
from vit_jax.compute.tokens import Tokens

# Implementations with the same result: plain XLA, cuDNN's on GPUs, splash (Pallas) on TPUs.
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "splash")
# What is added to the logits.
Bias = jax.Array | jax.tree_util.Partial
# Logits of a part with at most this many queries or keys are stored: that costs less than reading
# all the others again.
FEW = 8


@choices.by_platform
def project(x: Tokens, kernel: jax.Array, bias: jax.Array | None) -> tuple[Tokens, ...]:
    """x (B, N, D), kernel (D, T, H, C), bias (T, H, C) or `None` -> T times heads (B, N, H, C)."""
    # One matrix product, in its own order: else XLA transposes the tokens and the kernel first.
    y = dense(x, kernel, bias)
    unstacked = [jnp.unstack(part, axis=2) for part in jax.tree.leaves(y)]
    return tuple(jax.tree.unflatten(jax.tree.structure(y), t) for t in zip(*unstacked, strict=True))


def merge(heads: Tokens, kernel: jax.Array, bias: jax.Array | None) -> Tokens:
    """heads (B, N, H, C), kernel (H, C, D), bias (D,) or `None` -> (B, N, D)."""
    flat = jax.tree.map(lambda y: y.reshape(*y.shape[:2], -1), heads)
    return dense(flat, kernel.reshape(-1, kernel.shape[-1]), bias)


def attend(
    q: Tokens,
    k: Tokens,
    v: Tokens,
    *,
    bias: Bias | None = None,
    implementation: str = "auto",
) -> Tokens:
    """softmax(q kᵀ / √C + bias) v.

    The backward pass stores the result and the logarithm of the softmax's denominator, named for
    `remat`, and computes the weights from them again (FlashAttention, arXiv 2205.14135 §3): half the
    memory of storing them, and fewer passes over it.

    Args:
      q: queries (B, Q, H, C), whole or in parts.
      k, v: keys and values (B, N, H, C), in as many parts.
      bias: (H, Q, N) or (B, H, Q, N), for queries and keys that are whole; it has a gradient. Or a
        function that gives (B, H, Q, N) for the scaled queries: it is computed again in the
        backward pass, which stores its arguments alone.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      As q, in the dtype of v.

    Raises:
      ConfigError: the implementation cannot add a bias.
    """
    size, dtype = jax.tree.leaves(q)[0].shape[-1], jax.tree.leaves(q)[0].dtype
    chosen = choices.attention(
        implementation,
        queries=tokens.count(q),
        keys=tokens.count(k),
        head_size=size,
        dtype=dtype,
        biased=bias is not None,
    )
    q = _scaled(q)
    if chosen != "xla":
        return {"cudnn": gpu.cudnn, "splash": tpu.splash}[chosen](q, k, v)
    outs = _attend(*(tuple(jax.tree.leaves(x)) for x in (q, k, v)), bias)
    return jax.tree.unflatten(jax.tree.structure(q), outs)


def weights(q: Tokens, k: Tokens, *, bias: Bias | None = None) -> jax.Array:
    """softmax(q kᵀ / √C + bias): (B, H, Q, N) in the dtype of q, of all parts together."""
    return jax.nn.softmax(logits(q, k, bias=bias)).astype(jax.tree.leaves(q)[0].dtype)


def logits(q: Tokens, k: Tokens, *, bias: jax.Array | None = None) -> jax.Array:
    """q kᵀ / √C + bias: (B, H, Q, N) float32, of all parts together."""
    return _logits(tokens.join(_scaled(q)), tokens.join(k), bias)


def weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Sums of the values (B, N, H, C), weighted by (B, H, Q, N): (B, Q, H, C)."""
    return jnp.einsum("bhqn,bnhc->bqhc", weights, v)


@choices.by_platform
def weighted_sums(exponentials: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the keys, of exponentials (B, H, Q, N): weighted values (B, Q, H, C) for v
    (B, N, H, C), and of the exponentials themselves (B, H, Q); in float32.
    """
    return product("bhqn,bnhc->bqhc", exponentials.astype(v.dtype), v), exponentials.sum(-1)


@jax.custom_vjp
def _attend(qs, ks, vs, bias):
    """Attention of scaled queries; each argument is a tuple of parts, and every query sees the keys
    of all parts.
    """
    return _forward(qs, ks, vs, bias)[0]


def _forward(qs, ks, vs, bias):
    outs, logsumexps, stored = [], [], []
    for q in qs:
        logits = [_logits(q, k, bias) for k in ks]
        stored.append([_if_few(x) for x in logits])
        largest = functools.reduce(jnp.maximum, [x.max(-1, keepdims=True) for x in logits])
        sums = [weighted_sums(jnp.exp(x - largest), v) for x, v in zip(logits, vs, strict=True)]
        out, total = (sum(terms) for terms in zip(*sums, strict=True))
        # Dividing here touches C numbers for each query instead of N.
        out = (out / total.swapaxes(1, 2)[..., None]).astype(q.dtype)
        outs.append(recompute.named(out, recompute.ATTENTION))
        logsumexps.append(recompute.named(largest[..., 0] + jnp.log(total), recompute.ATTENTION))
    return tuple(outs), (qs, ks, vs, bias, outs, logsumexps, stored)


def _backward(saved, douts):
    qs, ks, vs, bias, outs, logsumexps, stored = saved
    dqs, dks, dvs = [0] * len(qs), [0] * len(ks), [0] * len(vs)
    dbias = None
    for i, (q, out, logsumexp, dout) in enumerate(zip(qs, outs, logsumexps, douts, strict=True)):
        delta = product("bqhc,bqhc->bhq", dout, out)[..., None]
        for j, (k, v) in enumerate(zip(ks, vs, strict=True)):
            logits = _logits(q, k, bias) if stored[i][j] is None else stored[i][j]
            p = jnp.exp(logits - logsumexp[..., None])
            dp = product("bqhc,bnhc->bhqn", dout, v)
            dlogits = p * (dp - delta)
            if callable(bias):
                added, back = jax.vjp(lambda bias, q: bias(q), bias, q)
                dbias, dq = back(dlogits.astype(added.dtype))
                dqs[i] += dq
            elif bias is not None:
                dbias = dlogits.sum(range(4 - bias.ndim)).astype(bias.dtype)
            dlogits = dlogits.astype(q.dtype)
            dqs[i] += product("bhqn,bnhc->bqhc", dlogits, k).astype(q.dtype)
            dks[j] += product("bhqn,bqhc->bnhc", dlogits, q).astype(k.dtype)
            dvs[j] += product("bhqn,bqhc->bnhc", p.astype(v.dtype), dout).astype(v.dtype)
    return tuple(dqs), tuple(dks), tuple(dvs), dbias


_attend.defvjp(_forward, _backward)


def _scaled(q: Tokens) -> Tokens:
    return jax.tree.map(lambda q: q / jnp.sqrt(q.shape[-1]).astype(q.dtype), q)


def _logits(q, k, bias):
    logits = product("bqhc,bnhc->bhqn", q, k)
    if bias is None:
        return logits
    return logits + (bias(q) if callable(bias) else bias)


def _if_few(logits: jax.Array) -> jax.Array | None:
    return recompute.named(logits, recompute.ATTENTION) if min(logits.shape[-2:]) <= FEW else None
