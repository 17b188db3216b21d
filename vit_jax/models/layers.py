"""What every family shares: linear layer, MLP and norm. Attention is next door."""

import jax
from flax import nnx

from vit_jax.compute import dense, norms, recompute
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dropout import dropout, split


class Linear(nnx.Linear):
    """`nnx.Linear` by `dense`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., F) in the layer's dtype."""
        return dense.dense(x.astype(self.dtype), self.kernel[...], self.bias[...])


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

    def __call__(self, x, key: jax.Array | None = None):
        """x (..., D) -> the same; or of several such, as a tuple."""
        keys = split(key, 2)
        up, down = _parameters(self.up), _parameters(self.down)

        def run(x):
            x = recompute.keep(dense.dense(x, *up), recompute.HIDDEN)
            x = dropout(ACTIVATIONS[self.activation](x), self.dropout, keys[0])
            return dropout(dense.dense(x, *down), self.dropout, keys[1])

        return jax.tree.map(run, x)


def layer_norm(
    width: int, epsilon: float, dtype, rngs: nnx.Rngs, *, bias: bool = True
) -> nnx.LayerNorm:
    """Layer norm over the last axis, its statistics in float32 whatever `dtype`."""
    return LayerNorm(width, epsilon=epsilon, use_bias=bias, dtype=dtype, rngs=rngs)


class LayerNorm(nnx.LayerNorm):
    """Flax's, with a backward pass that reduces nothing anew: see `norms`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """x (..., D) -> the same in the norm's dtype."""
        y = norms.normalise(x, self.epsilon) * self.scale[...]
        return (y if self.bias is None else y + self.bias[...]).astype(self.dtype)


def _parameters(linear: nnx.Linear) -> tuple[jax.Array, jax.Array]:
    return dense.shared(linear.kernel[...], linear.bias[...], linear.dtype)


def _mlp_linear(inputs: int, outputs: int, dtype, rngs: nnx.Rngs) -> nnx.Linear:
    return nnx.Linear(
        inputs,
        outputs,
        kernel_init=nnx.initializers.xavier_uniform(),
        bias_init=nnx.initializers.normal(1e-6),
        dtype=dtype,
        rngs=rngs,
    )
