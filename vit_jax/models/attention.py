"""Multi-head attention with one QKV parameter (ViT §A)."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import attend, choices, dense, partitioning
from vit_jax.compute.dropout import dropout, split
from vit_jax.models.layers import layer_norm

QUERY, KEY, VALUE = range(3)


class Attention(nnx.Module):
    """Multi-head dot-product attention; queries may come from elsewhere (attention pooling).

    Parameters: `qkv/kernel` (D, 3, H, D/H), `qkv/bias` (3, H, D/H), `out/kernel` (H, D/H, D),
    `out/bias` (D,); with `qk_norm` a layer norm of D/H on queries and on keys (ViT-22B §2.1).
    `implementation`: how tokens attend to each other, see `attend`; `auto` to choose.
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qk_norm: bool = False,
        qkv_bias: bool = True,
        norm_bias: bool = True,
        epsilon: float = 1e-6,
        implementation: str = "xla",
        dtype,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} heads")
        size = width // heads
        of_qkv = (3, heads, size)
        self.qkv = _Affine((width, *of_qkv), of_qkv if qkv_bias else None, _xavier(width), rngs)
        self.out = _Affine((heads, size, width), (width,), _xavier(width), rngs)
        self.qk_norm = qk_norm
        if qk_norm:
            self.query_norm = layer_norm(size, epsilon, dtype, rngs, bias=norm_bias)
            self.key_norm = layer_norm(size, epsilon, dtype, rngs, bias=norm_bias)
        self.implementation = implementation
        self.dropout, self.attention_dropout = dropout, attention_dropout

    def __call__(
        self, x: jax.Array, *, queries: jax.Array | None = None, key: jax.Array | None = None
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to x.

        Args:
          x: (B, N, D) what is attended to.
          queries: (B, Q, D), by default x itself.
          key: randomness of dropout; `None` for none.

        Returns:
          (B, Q, D) and the attention weights (B, H, Q, N), which cost nothing unless used.
        """
        keys = split(key, 2)
        kernel, bias = self.qkv.parameters()
        if queries is None:
            q, k, v = _project(x, kernel, bias)
        else:
            (q,) = _project(queries, kernel[:, :KEY], None if bias is None else bias[:KEY])
            k, v = _project(x, kernel[:, KEY:], None if bias is None else bias[KEY:])
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
        weights = attend.weights(q, k)
        if keys[0] is not None and self.attention_dropout:
            dropped = dropout(weights, self.attention_dropout, keys[0])
            heads = jnp.einsum("bhqn,bnhc->bqhc", dropped, v)
        else:
            # Kernels are made for many queries; one that pools is none of theirs.
            kind = "xla" if queries is not None else self._chosen(q)
            heads = attend.attend(q, k, v, kind)
        kernel, bias = self.out.parameters()
        out = _out(heads, kernel.reshape(-1, kernel.shape[-1]), bias)
        return dropout(out, self.dropout, keys[1]), weights

    def of_parts(self, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        """Attends to the tokens of all parts (B, N_i, D), without dropout; returns the same."""
        dtype = parts[0].dtype
        projections = _of_tiles(*self.qkv.parameters(), dtype)
        qs, ks, vs = (tuple(project(x) for x in parts) for project in projections)
        if self.qk_norm:
            qs, ks = tuple(map(self.query_norm, qs)), tuple(map(self.key_norm, ks))
        qs = tuple(q / jnp.sqrt(q.shape[-1]).astype(q.dtype) for q in qs)
        kernel, bias = dense.shared(*self.out.parameters(), dtype)
        kernel = kernel.reshape(-1, kernel.shape[-1])
        heads = attend.attend_in_parts(qs, ks, vs)
        return tuple(_out(x, kernel, bias) for x in heads)

    def _chosen(self, q: jax.Array) -> str:
        return choices.attention(
            self.implementation, tokens=q.shape[1], head_size=q.shape[-1], dtype=q.dtype
        )


class _Affine(nnx.Module):
    """A kernel and perhaps a bias."""

    def __init__(self, kernel_shape, bias_shape, init, rngs):
        self.kernel = nnx.Param(init(rngs.params(), kernel_shape))
        if bias_shape is not None:
            self.bias = nnx.Param(jnp.zeros(bias_shape))

    def parameters(self) -> tuple[jax.Array, jax.Array | None]:
        return self.kernel[...], self.bias[...] if hasattr(self, "bias") else None


def _project(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, ...]:
    """x (B, N, D), kernel (D, T, H, C) -> T arrays (B, N, H, C)."""
    if partitioning.platform() == "tpu":
        return tuple(project(x) for project in _of_tiles(kernel, bias, x.dtype))
    # One matrix product, in its own order: else XLA transposes the tokens and the kernel first.
    return jnp.unstack(dense.dense(x, kernel, bias), axis=2)


def _out(heads: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """heads (B, N, H, C), kernel (H·C, D) -> (B, N, D)."""
    return dense.dense(heads.reshape(*heads.shape[:2], -1), kernel, bias)


def _of_tiles(kernel: jax.Array, bias: jax.Array | None, dtype) -> list[Callable]:
    """The T projections, of (B, N, D) to (B, N, H, C) each, as products to H·C features: a TPU pads
    what is smaller than its tiles.
    """
    kernel, bias = dense.shared(kernel, bias, dtype)
    _, count, heads, size = kernel.shape
    kernels = [kernel[:, t].reshape(-1, heads * size) for t in range(count)]
    biases = [None] * count if bias is None else bias.reshape(count, -1)

    def project(kernel, bias, x):
        y = dense.dense_features_first(x, kernel, bias)
        return y.reshape(heads, size, *x.shape[:2]).transpose(2, 3, 0, 1)

    return [functools.partial(project, *both) for both in zip(kernels, biases, strict=True)]


def _xavier(width: int):
    """Xavier-uniform of a (width, width) projection, whatever axes its array has and however many
    lie in it.
    """
    limit = (6 / (width + width)) ** 0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-limit, maxval=limit)
