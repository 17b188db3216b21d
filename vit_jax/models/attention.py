"""Multi-head attention with one QKV parameter (ViT §A). What only published weights need is in
`vit_zoo_blocks.PublishedAttention`, which extends it.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import attend
from vit_jax.compute.dropout import dropout, split

KEY = 1  # where in QKV keys begin, and queries end


def implementation_option():
    """The option `attention` of families that have it."""
    return option(
        "auto",
        "how attention is computed; all give the same. cudnn: GPU, 16 bits; splash: TPU",
        choices=attend.IMPLEMENTATIONS,
        role="compute",
    )


class Attention(nnx.Module):
    """Multi-head dot-product attention; queries may come from elsewhere (attention pooling).

    Parameters: `qkv/kernel` (D, 3, H, D/H), or (`inputs`, …) where tokens are of another size than D;
    `qkv/bias` (3, H, D/H); `out/kernel` (H, D/H, D), `out/bias` (D,). `implementation` is one of
    `attend.IMPLEMENTATIONS`.

    To build on it, override
      `project`: what queries, keys and values are; e.g. rotate queries and keys by their positions.
      `attend`: what is made of them. With something added to the logits, call it with `bias`; to
        change the weights, take `attend.weights` and `attend.weighted`.
      `merge`: from heads to tokens.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        inputs: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qkv_bias: bool = True,
        out_bias: bool = True,
        implementation: str = "xla",
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"width {width} cannot be split into {heads} heads")
        size, init = width // heads, _xavier(width)
        qkv_bias_shape = (3, heads, size) if qkv_bias else None
        self.qkv = _Affine((inputs or width, 3, heads, size), qkv_bias_shape, init, rngs)
        self.out = _Affine((heads, size, width), (width,) if out_bias else None, init, rngs)
        self.dropout, self.attention_dropout = dropout, attention_dropout
        self.implementation, self.dtype = implementation, dtype

    def __call__(
        self,
        x: jax.Array,
        *,
        queries: jax.Array | None = None,
        key: jax.Array | None = None,
        bias: attend.Bias | None = None,
        lengths: jax.Array | None = None,
        **positions,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to x.

        Args:
          x: (B, N, D) what is attended to.
          queries: (B, Q, D), by default x itself.
          key: randomness of dropout; `None` for none.
          bias: what is added to the logits, see `attend.attend`.
          lengths: (B,), how many leading tokens of x count, see `attend.attend`; `None`: all.
          positions: what the `project` of a subclass takes beside tokens.

        Returns:
          (B, Q, D) and the attention weights (B, H, Q, N), which cost nothing unless used.
        """
        keys, x = split(key, 2), x.astype(self.dtype)
        # A subclass may take neither.
        counting = {} if lengths is None else {"lengths": lengths}
        added = counting if bias is None else counting | {"bias": bias}
        drops = keys[0] is not None and self.attention_dropout
        heads = None
        if self.is_plain and queries is None and not (bias is not None or positions or drops):
            options = dict(implementation=self.implementation, **counting)
            heads = attend.project_and_attend(x, *self.qkv_parameters(), **options)
        q, k, v = self.project(x, queries, **positions)
        if heads is None:
            heads, weights = self.attend(q, k, v, key=keys[0], **added)
        else:
            weights = attend.weights(q, k)
        return dropout(self.merge(heads), self.dropout, keys[1]), weights

    @property
    def is_plain(self) -> bool:
        """Whether nothing lies between projection and attention, so that one function may do both."""
        own = type(self).project, type(self).attend
        return own == (Attention.project, Attention.attend)

    def qkv_parameters(self) -> tuple[jax.Array, jax.Array | None]:
        """Kernel (D, 3, H, C) and bias (3, H, C) or `None`."""
        return self.qkv.parameters()

    def project(
        self, x: jax.Array, queries: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, Q, H, C), keys and values (B, N, H, C) of x (B, N, D) and queries (B, Q, D)."""
        kernel, bias = self.qkv_parameters()
        if queries is None:
            return attend.project(x, kernel, bias, implementation=self.implementation)
        (q,) = attend.project(queries, kernel[:, :KEY], None if bias is None else bias[:KEY])
        return q, *attend.project(x, kernel[:, KEY:], None if bias is None else bias[KEY:])

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        key: jax.Array | None,
        bias: attend.Bias | None = None,
        lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """softmax(q kᵀ / √C + bias) v, (B, Q, H, C), with dropout on the weights by `key`; and these,
        (B, H, Q, N). Arguments as in `project` and `__call__`.
        """
        added = dict(bias=bias, lengths=lengths)
        weights = attend.weights(q, k, **added)
        if key is not None and self.attention_dropout:
            return attend.weighted(dropout(weights, self.attention_dropout, key), v), weights
        return attend.attend(q, k, v, **added, implementation=self.implementation), weights

    def merge(self, heads: jax.Array) -> jax.Array:
        """Heads (B, N, H, C) to tokens (B, N, D)."""
        return attend.merge(heads, *self.out.parameters())


def attention_flops(tokens: int, width: int, *, attended: int | None = None) -> int:
    """Operations of `Attention`, full, a multiply-add counted as 2.

    Args:
      attended: tokens that each token attends to; by default all.
    """
    attended = tokens if attended is None else attended
    return 8 * tokens * width**2 + 4 * tokens * attended * width


class _Affine(nnx.Module):
    """A kernel and perhaps a bias."""

    def __init__(
        self,
        kernel_shape: tuple[int, ...],
        bias_shape: tuple[int, ...] | None,
        init: Callable,
        rngs: nnx.Rngs,
    ):
        self.kernel = nnx.Param(init(rngs.params(), kernel_shape))
        if bias_shape is not None:
            self.bias = nnx.Param(jnp.zeros(bias_shape))

    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        return self.kernel[...], self.bias[...] if hasattr(self, "bias") else None


def _xavier(width: int) -> Callable:
    """Xavier-uniform of a (width, width) projection, whatever axes its array has and however many
    lie in it.
    """
    limit = (6 / (width + width)) ** 0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-limit, maxval=limit)
