"""What every family shares: the output contract, dtypes, MLP, dropout and stochastic depth.
Attention is next door.
"""

from collections.abc import Callable

import flax.struct
import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from vit_jax.models import products

ACTIVATIONS: dict[str, Callable] = {
    "gelu_tanh": lambda x: nnx.gelu(x, approximate=True),
    "gelu": lambda x: nnx.gelu(x, approximate=False),
}


@flax.struct.dataclass
class ModelOutput:
    """What every model returns.

    Attributes:
      logits: (B, classes) float32; `None` for a model without a head.
      features: (B, D) the input of the last linear layer; what few-shot and retrieval use.
      tokens: (B, N, D) after the last norm.
      intermediates: on request, by name; e.g. `attention` (L, B, H, N, N) and `blocks` (L, B, N,
        D). Empty otherwise.
      head_logits: (B, 2, classes) float32, of a model with a class and a distillation head;
        `logits` is their mean.
    """

    logits: jax.Array | None
    features: jax.Array
    tokens: jax.Array
    intermediates: dict[str, jax.Array] = flax.struct.field(default_factory=dict)
    head_logits: jax.Array | None = None


class Mlp(nnx.Module):
    """Dense, activation, dropout, dense, dropout (ViT Eq. 3); kernels Xavier-uniform, biases
    normal(1e-6).
    """

    def __init__(
        self, width: int, hidden: int, *, activation: str, dropout: float, dtype, rngs: nnx.Rngs
    ):
        self.up = _mlp_linear(width, hidden, dtype, rngs)
        self.down = _mlp_linear(hidden, width, dtype, rngs)
        self.activation, self.dropout = activation, dropout

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """x (..., D) -> (..., D)."""
        keys = split(key, 2)
        x = ACTIVATIONS[self.activation](checkpoint_name(self.up(x), "hidden"))
        x = dropout(x, self.dropout, keys[0])
        return dropout(self.down(x), self.dropout, keys[1])


def layer_norm(
    width: int, epsilon: float, dtype, rngs: nnx.Rngs, *, bias: bool = True
) -> nnx.LayerNorm:
    """Layer norm over the last axis, its statistics in float32 whatever `dtype`."""
    return nnx.LayerNorm(width, epsilon=epsilon, use_bias=bias, dtype=dtype, rngs=rngs)


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Zeroes elements with probability `rate` and scales the rest by 1 / (1 - rate); `key=None`
    leaves x alone.
    """
    if rate == 0 or key is None:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), jnp.zeros_like(x))


def drop_path(residual: jax.Array, rate: jax.Array | float, key: jax.Array | None) -> jax.Array:
    """Stochastic depth (arXiv 1603.09382): drops an example's residual with probability `rate`,
    scales the others up.

    Args:
      residual: (B, ...) what a block adds to its input.
      rate: scalar in [0, 1); may be traced, since it grows with depth.
      key: `None` leaves the residual alone.
    """
    if key is None:
        return residual
    keep = jax.random.bernoulli(key, 1 - rate, (residual.shape[0],) + (1,) * (residual.ndim - 1))
    return residual * (keep / (1 - rate)).astype(residual.dtype)


def split(key: jax.Array | None, count: int) -> list:
    """`count` keys, or that many `None` where there is no randomness."""
    return [None] * count if key is None else list(jax.random.split(key, count))


def _mlp_linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> products.Linear:
    return products.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.xavier_uniform(),
        bias_init=nnx.initializers.normal(1e-6),
        dtype=dtype,
        rngs=rngs,
    )
