"""Attention: tokens projected to heads, softmax(q kᵀ / √C + bias) v of each head (ViT Eq. 6 and 7), and
heads projected back.

Heads are (B, N, H, C). Softmax is in float32, and sums are accumulated in it.
"""

import contextlib
import contextvars
import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from vit_jax.base.errors import ConfigError
from vit_jax.base.lazy_table import LazyTable
from vit_jax.compute import platform, recompute
from vit_jax.compute.dense import dense, product
from vit_jax.compute.platform import by_platform

# Implementations with the same result: plain XLA, cuDNN's on GPUs, and of Pallas on TPUs our own up to
# 2,560 tokens and splash for longer sequences.
IMPLEMENTATIONS = ("auto", "xla", "cudnn", "short", "splash")
KERNELS = LazyTable(
    {
        "cudnn": "vit_jax.compute.cudnn",
        "short": "vit_jax.compute.tpu_attention",
        "splash": "vit_jax.compute.splash",
    }
)
# What is added to the logits.
Bias = jax.Array | jax.tree_util.Partial
# Logits of at most this many queries or keys are stored: that costs less than reading all the
# others again.
FEW = 8
# From this many tokens N on, a GPU computes attention by cuDNN. Counted, not measured: plain XLA
# writes and reads a head's logits in float32 and weights in 16 bits, 12 N² bytes a forward pass; the
# fused kernel reads and writes q, k, v and the result, 8 N C bytes. Heads of C = 64 are even at 43
# tokens, and at 197 plain XLA moves 4.6 times as much. The kernel works in tiles of 128 tokens, which
# fewer do not fill. `tests/benchmarks/step_peers.py --device=cuda` compares the two.
CUDNN_TOKENS = 128
SPLASH_TOKENS = 1024

_traced: contextvars.ContextVar[dict[str, None] | None] = contextvars.ContextVar(
    "traced", default=None
)


@contextlib.contextmanager
def record() -> Iterator[dict[str, None]]:
    """Collects the implementations of the attention that is traced inside, in the order of their first use."""
    kinds: dict[str, None] = {}
    token = _traced.set(kinds)
    try:
        yield kinds
    finally:
        _traced.reset(token)


@by_platform
def project(
    x: jax.Array, kernel: jax.Array, bias: jax.Array | None, *, implementation: str = "xla"
) -> tuple[jax.Array, ...]:
    """Tokens projected to heads.

    Args:
      x: (B, N, D).
      kernel: (D, T, H, C).
      bias: (T, H, C) or `None`.
      implementation: of the attention that takes the heads, one of `IMPLEMENTATIONS`.

    Returns:
      T times heads (B, N, H, C).
    """
    # One matrix product, in its own order: else XLA transposes the tokens and the kernel first.
    return tuple(jnp.unstack(dense(x, kernel, bias), axis=2))


def merge(heads: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """heads (B, N, H, C), kernel (H, C, D), bias (D,) or `None` -> (B, N, D)."""
    flat = heads.reshape(*heads.shape[:2], -1)
    return dense(flat, kernel.reshape(-1, kernel.shape[-1]), bias)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: Bias | None = None,
    lengths: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array:
    """softmax(q kᵀ / √C + bias) v.

    The backward pass stores the result and the logarithm of the softmax's denominator, named for
    `remat`, and computes the weights from them again (FlashAttention, arXiv 2205.14135 §3): half the
    memory of storing them, and fewer passes over it.

    Args:
      q: queries (B, Q, H, C).
      k, v: keys and values (B, N, H, C).
      bias: (H, Q, N) or (B, H, Q, N); it has a gradient. Or a function that gives (B, H, Q, N) for
        the scaled queries: it is computed again in the backward pass, which stores its arguments
        alone.
      lengths: (B,) int32 of 1 or more, how many leading keys of each image count; `None`: all. Keys at or
        beyond it have weight 0, and they and their values gradient 0. Rows of padded queries are finite.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      As q, in the dtype of v.

    Raises:
      ConfigError: the implementation cannot add a bias, or not take these heads.
    """
    chosen = choose(
        implementation,
        queries=q.shape[1],
        keys=k.shape[1],
        heads=q.shape[2],
        head_size=q.shape[3],
        dtype=q.dtype,
        biased=bias is not None,
    )
    _note(chosen)
    if chosen == "short":
        return KERNELS["short"].attend(q, k, v, lengths)
    if chosen == "cudnn":
        return KERNELS["cudnn"].fused_attention(q, k, v, lengths)
    q, rest = _scaled(q)
    if chosen == "splash":
        return KERNELS["splash"].splash(_rescaled(q, rest), k, v, lengths)
    return _attend(q, k, v, bias, lengths, rest)


def project_and_attend(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    lengths: jax.Array | None = None,
    implementation: str = "auto",
) -> jax.Array | None:
    """`attend` of what `project` gives, for self-attention with nothing between the two, where one
    function for both is faster: a kernel that takes the product as it is. `None` elsewhere.

    Args:
      x: (B, N, D).
      kernel, bias: (D, 3, H, C), and (3, H, C) or `None`.
      lengths: as in `attend`.
      implementation: one of `IMPLEMENTATIONS`.

    Returns:
      (B, N, H, C).
    """
    tokens = x.shape[1]
    heads, size = kernel.shape[2:]
    chosen = choose(
        implementation,
        queries=tokens,
        keys=tokens,
        heads=heads,
        head_size=size,
        dtype=x.dtype,
    )
    if chosen != "short" or not KERNELS["short"].packs(tokens, heads, size, x.dtype):
        return None
    _note(chosen)
    products = dense(x, kernel.reshape(len(kernel), -1), None)
    flat = None if bias is None else bias.reshape(-1)
    out = KERNELS["short"].attend_packed(products, flat, size, lengths)
    return out.reshape(*x.shape[:2], heads, size)


def weights(
    q: jax.Array, k: jax.Array, *, bias: Bias | None = None, lengths: jax.Array | None = None
) -> jax.Array:
    """softmax(q kᵀ / √C + bias): (B, H, Q, N) in the dtype of q; `lengths` as in `attend`."""
    return jax.nn.softmax(_scaled_logits(q, k, bias, lengths)).astype(q.dtype)


def logits(q: jax.Array, k: jax.Array, *, bias: Bias | None = None) -> jax.Array:
    """q kᵀ / √C + bias: (B, H, Q, N) float32."""
    return _scaled_logits(q, k, bias, None)


def weighted(weights: jax.Array, v: jax.Array) -> jax.Array:
    """Sums of the values (B, N, H, C), weighted by (B, H, Q, N): (B, Q, H, C)."""
    _note("xla")
    return jnp.einsum("bhqn,bnhc->bqhc", weights, v)


@by_platform
def weighted_sums(exponentials: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums over the keys, of exponentials (B, H, Q, N): weighted values (B, Q, H, C) for v
    (B, N, H, C), and of the exponentials themselves (B, H, Q); in float32.
    """
    return product("bhqn,bnhc->bqhc", exponentials.astype(v.dtype), v), exponentials.sum(-1)


def choose(
    asked: str,
    *,
    queries: int,
    keys: int,
    heads: int,
    head_size: int,
    dtype: jax.typing.DTypeLike,
    biased: bool = False,
) -> str:
    """The implementation of attention: `asked`, or for `auto` what suits device and shape. The kernels
    need as many queries as keys; without that plain XLA is used, whatever was asked for.

    Args:
      asked: one of `IMPLEMENTATIONS`.
      queries, keys: how many tokens attend, and to how many.
      heads, head_size, dtype: of queries and keys.
      biased: whether a bias is added to the logits, which the kernels cannot do.

    Raises:
      ConfigError: a kernel is asked for that cannot compute this, or not on these devices.
    """
    if asked not in ("auto", "xla"):
        _check_kernel(asked, queries, keys, heads, head_size, dtype, biased)
    if biased or queries != keys:
        return "xla"
    if asked != "auto":
        return asked
    if platform.current() == "gpu":
        return (
            "cudnn" if keys >= CUDNN_TOKENS and KERNELS["cudnn"].fits(head_size, dtype) else "xla"
        )
    if platform.current() == "tpu":
        short = KERNELS["short"].fits(keys, heads, head_size, dtype)
        return "short" if short else "splash" if keys >= SPLASH_TOKENS else "xla"
    return "xla"


def _check_kernel(asked, queries, keys, heads, head_size, dtype, biased) -> None:
    """Raises `ConfigError` for a kernel that cannot compute what `choose` is asked for."""
    if biased:
        raise ConfigError(
            f"config.model.attention={asked} cannot add a bias to the attention logits: set auto or xla"
        )
    if asked == "cudnn" and platform.current() != "gpu":
        raise ConfigError(
            f"config.model.attention=cudnn needs a GPU, and this is computed on a {platform.current().upper()}: "
            "set auto or xla"
        )
    fits = asked != "short" or KERNELS["short"].fits(keys, heads, head_size, dtype)
    if not fits and queries == keys:
        tokens, sizes = KERNELS["short"].TOKENS, KERNELS["short"].HEAD_SIZES
        raise ConfigError(
            f"config.model.attention=short takes {tokens[0]} to {tokens[-1]} tokens and heads of {sizes[0]} to "
            f"{sizes[-1]} channels, in multiples of {sizes.step}, that fit a device's fast memory, and got "
            f"{keys} tokens and {heads} heads of {head_size}: set auto or xla"
        )


def _note(implementation: str) -> None:
    """Adds to what `record` collects."""
    kinds = _traced.get()
    if kinds is not None:
        kinds[implementation] = None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attend(q, k, v, bias, lengths, rest):
    """Attention of queries and the `rest` of their scale, see `_scaled`."""
    return _forward(q, k, v, bias, lengths, rest)[0]


def _forward(q, k, v, bias, lengths, rest):
    logits, rest = _logits(q, k, bias, lengths, rest)
    few = min(logits.shape[-2:]) <= FEW
    stored = recompute.named(logits, recompute.ATTENTION) if few else None
    largest = logits.max(-1, keepdims=True)
    sums, total = weighted_sums(jnp.exp(_times(rest, logits - largest)), v)
    # Dividing here touches C numbers for each query instead of N.
    out = (sums / total.swapaxes(1, 2)[..., None]).astype(q.dtype)
    out = recompute.named(out, recompute.ATTENTION)
    # Before the rest of the scale, as the logits from which it is subtracted.
    logsumexp = largest[..., 0] + _times(1 / rest, jnp.log(total))
    logsumexp = recompute.named(logsumexp, recompute.ATTENTION)
    return out, (q, k, v, bias, lengths, out, logsumexp, stored)


def _backward(rest, saved, dout):
    q, k, v, bias, lengths, out, logsumexp, stored = saved
    delta = product("bqhc,bqhc->bhq", dout, out)[..., None]
    logits, rest_of_logits = _logits(q, k, bias, lengths, rest, stored)
    p = jnp.exp(_times(rest_of_logits, logits - logsumexp[..., None]))
    dlogits = p * (product("bqhc,bnhc->bhqn", dout, v) - delta)
    dbias, dq = None, 0
    if callable(bias):
        added, back = jax.vjp(lambda bias, q: bias(_rescaled(q, rest)), bias, q)
        dbias, dq = back(dlogits.astype(added.dtype))
    elif bias is not None:
        dbias = dlogits.sum(range(4 - bias.ndim)).astype(bias.dtype)
    dlogits = dlogits.astype(q.dtype)
    dq += _times(rest, product("bhqn,bnhc->bqhc", dlogits, k)).astype(q.dtype)
    dk = _times(rest, product("bhqn,bqhc->bnhc", dlogits, q)).astype(k.dtype)
    dv = product("bhqn,bqhc->bnhc", p.astype(v.dtype), dout).astype(v.dtype)
    return dq, dk, dv, dbias, None


_attend.defvjp(_forward, _backward)


def _scaled(q: jax.Array) -> tuple[jax.Array, float]:
    """Queries / √C, and the rest of that scale, which float32 logits are to be multiplied by; it is 1 for float32.

    In 16 bits a √C that is no power of two is wrong by up to 0.2 %, which is another temperature of every softmax: the
    queries are divided by the nearest power of two, which rounds nothing.
    """
    size = q.shape[-1]
    if q.dtype.itemsize > 2:
        return q / jnp.sqrt(size).astype(q.dtype), 1.0
    power = 2.0 ** round(math.log2(size) / 2)
    return q / power, power / math.sqrt(size)


def _rescaled(q: jax.Array, rest: float) -> jax.Array:
    """Queries with the rest of their scale, rounded once, for what takes them as they are."""
    return q if rest == 1 else (rest * q.astype(jnp.float32)).astype(q.dtype)


def _times(rest: float, x: jax.Array) -> jax.Array:
    return x if rest == 1 else rest * x


def _scaled_logits(q, k, bias, lengths):
    q, rest = _scaled(q)
    logits, rest = _logits(q, k, bias, lengths, rest)
    return _times(rest, logits)


def _logits(q, k, bias, lengths, rest, stored=None):
    """The logits, and what is left of their scale: it is multiplied with where they are read, which takes no pass over
    them of its own, and before a bias is added or keys are masked.
    """
    plain = bias is None and lengths is None
    if stored is not None:
        return stored, rest if plain else 1.0
    logits = product("bqhc,bnhc->bhqn", q, k)
    if plain:
        return logits, rest
    logits = _times(rest, logits)
    if bias is not None:
        logits = logits + (bias(_rescaled(q, rest)) if callable(bias) else bias)
    if lengths is not None:
        counts = jnp.arange(k.shape[1]) < lengths[:, None]
        # Not minus infinity: an image without keys would give NaN.
        logits = jnp.where(counts[:, None, None], logits, jnp.finfo(logits.dtype).min)
    return logits, 1.0
