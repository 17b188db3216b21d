"""Multi-head attention with one QKV parameter (ViT §A)."""

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.models.layers import dropout, layer_norm, split

QUERY, KEY, VALUE = range(3)


class Attention(nnx.Module):
    """Multi-head dot-product attention; queries may come from elsewhere (attention pooling).

    Parameters: `qkv/kernel` (D, 3, H, D/H), `qkv/bias` (3, H, D/H), `out/kernel` (H, D/H, D),
    `out/bias` (D,); with `qk_norm` a layer norm of D/H on queries and on keys (ViT-22B §2.1).
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        dropout: float = 0.0,
        attention_dropout: float = 0.0,
        qk_norm: bool = False,
        epsilon: float = 1e-6,
        dtype,
        rngs: nnx.Rngs,
    ):
        if width % heads:
            raise ValueError(f"width {width} cannot be cut into {heads} heads")
        size = width // heads
        self.qkv = _Affine((width, 3, heads, size), (3, heads, size), _xavier(width), dtype, rngs)
        self.out = _Affine((heads, size, width), (width,), _xavier(width), dtype, rngs)
        self.qk_norm = qk_norm
        if qk_norm:
            self.query_norm = layer_norm(size, epsilon, dtype, rngs)
            self.key_norm = layer_norm(size, epsilon, dtype, rngs)
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
            (q,) = _project(queries, kernel[:, :KEY], bias[:KEY])
            k, v = _project(x, kernel[:, KEY:], bias[KEY:])
        if self.qk_norm:
            q, k = self.query_norm(q), self.key_norm(k)
        q = q / jnp.sqrt(q.shape[-1]).astype(q.dtype)
        logits = jnp.einsum("bqhc,bnhc->bhqn", q, k, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits).astype(v.dtype)
        heads = jnp.einsum("bhqn,bnhc->bqhc", dropout(weights, self.attention_dropout, keys[0]), v)
        kernel, bias = self.out.parameters()
        return dropout(
            jnp.einsum("bqhc,hcd->bqd", heads, kernel) + bias, self.dropout, keys[1]
        ), weights


class _Affine(nnx.Module):
    """A kernel and a bias kept in float32 and handed out in the compute dtype."""

    def __init__(self, kernel_shape, bias_shape, init, dtype, rngs):
        self.kernel = nnx.Param(init(rngs.params(), kernel_shape))
        self.bias = nnx.Param(jnp.zeros(bias_shape))
        self.dtype = dtype

    def parameters(self) -> tuple[jax.Array, jax.Array]:
        return self.kernel[...].astype(self.dtype), self.bias[...].astype(self.dtype)


def _project(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> tuple[jax.Array, ...]:
    """x (B, N, D), kernel (D, T, H, C) -> T arrays (B, N, H, C): one matrix product for the T
    projections.
    """
    # In the order of the matrix product, else XLA transposes the tokens and the kernel first.
    return jnp.unstack(jnp.einsum("bnd,dthc->bnthc", x, kernel) + bias, axis=2)


def _xavier(width: int):
    """Xavier-uniform of a (width, width) projection, whatever axes its array has and however many
    lie in it.
    """
    limit = (6 / (width + width)) ** 0.5
    return lambda key, shape: jax.random.uniform(key, shape, minval=-limit, maxval=limit)
