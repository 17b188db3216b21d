"""Multi-head attention with one QKV parameter (ViT §A)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.base.schema import option
from vit_jax.compute import attend, rope
from vit_jax.compute.dropout import dropout, split
from vit_jax.models.layers import norm

KEY = 1  # where in QKV keys begin, and queries end
# Cosines and sines of the angles that queries and keys are turned by, see `rope.turn`.
Angles = tuple[jax.Array, jax.Array]


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

    Parameters: `qkv/kernel` (D, 3, H, D/H), or where tokens are of another size than D (`inputs`, …);
    `qkv/bias` (3, H, D/H), or (2, H, D/H) without that of keys; `out/kernel` (H, D/H, D), `out/bias`
    (D,); with `qk_norm` a norm of D/H on queries and keys (ViT-22B §2.1), with `inner_norm` one of D
    on all heads' results together (arXiv 2210.06423). `scale` multiplies the products of queries and
    keys; 0 stands for 1/√C of heads of C channels.
    `implementation` is one of `attend.IMPLEMENTATIONS`.

    To build on it, override
      `project`: what queries, keys and values are; e.g. turn queries and keys by their positions.
      `attend`: what is made of them. With something added to the logits, call it with `bias`; to
        change the weights, take `attend.weights` and `attend.weighted`.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        inputs: int | None = None,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qk_norm: bool = False,
        qkv_bias: bool = True,
        key_bias: bool = True,
        out_bias: bool = True,
        inner_norm: bool = False,
        scale: float = 0.0,
        norm_kind: str = "layer",
        norm_bias: bool = True,
        epsilon: float = 1e-6,
        implementation: str = "xla",
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} heads")
        size = width // heads
        bias_shape = (3 if key_bias else 2, heads, size) if qkv_bias else None
        self.qkv = _Affine((inputs or width, 3, heads, size), bias_shape, _xavier(width), rngs)
        out_shape = (width,) if out_bias else None
        self.out = _Affine((heads, size, width), out_shape, _xavier(width), rngs)
        make_norm = functools.partial(
            norm, norm_kind, epsilon=epsilon, dtype=dtype, rngs=rngs, bias=norm_bias
        )
        self.qk_norm = qk_norm
        if qk_norm:
            self.query_norm, self.key_norm = make_norm(size), make_norm(size)
        self.inner_norm = make_norm(width) if inner_norm else None
        self.implementation = implementation
        self.query_scale = scale * size**0.5 if scale else 1.0  # what is missing to 1/√C
        self.dropout, self.attention_dropout = dropout, attention_dropout

    def __call__(
        self,
        x: jax.Array,
        *,
        queries: jax.Array | None = None,
        key: jax.Array | None = None,
        bias: attend.Bias | None = None,
        angles: Angles | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to x.

        Args:
          x: (B, N, D) what is attended to.
          queries: (B, Q, D), by default x itself.
          key: randomness of dropout; `None` for none.
          bias: what is added to the logits, see `attend.attend`.
          angles: that queries and keys are turned by, where both are x.

        Returns:
          (B, Q, D) and the attention weights (B, H, Q, N), which cost nothing unless used.
        """
        keys = split(key, 2)
        added = {} if bias is None else {"bias": bias}  # what builds on it may take none
        drops = keys[0] is not None and self.attention_dropout
        plain = queries is None and bias is None and angles is None and not drops
        heads = self._project_and_attend(x) if plain else None
        q, k, v = self.project(x, queries)
        if angles is not None:
            q, k = rope.turn(q, *angles), rope.turn(k, *angles)
        if self.query_scale != 1:
            q = q * self.query_scale
        if heads is None:
            heads, weights = self.attend(q, k, v, key=keys[0], **added)
        else:
            weights = attend.weights(q, k)
        if self.inner_norm is not None:
            heads = self.inner_norm(heads.reshape(*heads.shape[:2], -1)).reshape(heads.shape)
        out = attend.merge(heads, *self.out.parameters())
        return dropout(out, self.dropout, keys[1]), weights

    def project(
        self, x: jax.Array, queries: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (B, Q, H, C), keys and values (B, N, H, C) of x (B, N, D) and queries (B, Q, D)."""
        kernel, bias = self._qkv_parameters()
        if queries is None:
            q, k, v = attend.project(x, kernel, bias, implementation=self.implementation)
        else:
            (q,) = attend.project(queries, kernel[:, :KEY], None if bias is None else bias[:KEY])
            k, v = attend.project(x, kernel[:, KEY:], None if bias is None else bias[KEY:])
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        return q, k, v

    def attend(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        key: jax.Array | None,
        bias: attend.Bias | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """softmax(q kᵀ / √C + bias) v, with dropout on the weights.

        Args:
          q, k, v: see `project`.
          key: randomness of dropout; `None` for none.
          bias: what is added to the logits, see `attend.attend`.

        Returns:
          (B, Q, H, C) and the weights (B, H, Q, N).
        """
        weights = attend.weights(q, k, bias=bias)
        if key is not None and self.attention_dropout:
            return attend.weighted(dropout(weights, self.attention_dropout, key), v), weights
        return attend.attend(q, k, v, bias=bias, implementation=self.implementation), weights

    def _project_and_attend(self, x: jax.Array) -> jax.Array | None:
        """Heads (B, N, H, C) by one function, where nothing lies between projection and attention and
        it is faster; otherwise `None`.
        """
        overridden = (type(self).project, type(self).attend) != (
            Attention.project,
            Attention.attend,
        )
        if overridden or self.qk_norm or self.query_scale != 1:
            return None
        return attend.project_and_attend(
            x, *self._qkv_parameters(), implementation=self.implementation
        )

    def _qkv_parameters(self) -> tuple[jax.Array, jax.Array | None]:
        """Kernel (D, 3, H, C) and bias (3, H, C) or `None`."""
        kernel, bias = self.qkv.parameters()
        if bias is not None and len(bias) == 2:  # no keys'
            bias = jnp.stack([bias[0], jnp.zeros_like(bias[0]), bias[1]])
        return kernel, bias


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
