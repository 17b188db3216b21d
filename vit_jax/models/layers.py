"""What families share: linear layers, norm, MLP and a gate of channels. Attention is next door."""

import functools
from collections.abc import Callable

import jax
from flax import nnx

from vit_jax.compute import norms, recompute
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dense import dense
from vit_jax.compute.dropout import dropout, split
from vit_jax.compute.tokens import Tokens


class Linear(nnx.Linear):
    """`nnx.Linear` by `dense`."""

    def __call__(self, x: Tokens) -> Tokens:
        """(..., D) -> (..., F) in the layer's dtype; or several such."""
        x = jax.tree.map(lambda x: x.astype(self.dtype), x)
        return dense(x, self.kernel[...], self.bias[...])


class Kernel(nnx.Module):
    """The kernel of a layer without bias."""

    def __init__(self, init: Callable, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), shape))


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` by `norms.layer_norm`."""

    def __call__(self, x: Tokens) -> Tokens:
        """(..., D) -> the same in the norm's dtype; or several such."""
        bias = None if self.bias is None else self.bias[...]
        return norms.layer_norm(x, self.scale[...], bias, epsilon=self.epsilon, dtype=self.dtype)


def layer_norm(
    width: int, epsilon: float, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs, *, bias: bool = True
) -> LayerNorm:
    """Layer norm over the last axis, its statistics in float32 whatever `dtype`."""
    return LayerNorm(width, epsilon=epsilon, use_bias=bias, dtype=dtype, rngs=rngs)


def draw_kernels(module: nnx.Module, std: float, rngs: nnx.Rngs) -> None:
    """Draws every `kernel` of a module anew, from a normal distribution: how PyTorch's transformers
    usually begin (`trunc_normal_`, whose bounds of ±2 cut nothing).
    """
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path[-1] == "kernel":
            value = std * jax.random.normal(rngs.params(), parameter.shape)
            parameter.set_value(value)


class Mlp(nnx.Module):
    """Dense, activation, dropout, dense, dropout (ViT Eq. 3); kernels Xavier-uniform, biases
    normal(1e-6).
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        inputs: int | None = None,
        activation: str,
        dropout: float,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            Linear,
            kernel_init=nnx.initializers.xavier_uniform(),
            bias_init=nnx.initializers.normal(1e-6),
            dtype=dtype,
            rngs=rngs,
        )
        self.up, self.down = linear(inputs or width, hidden), linear(hidden, width)
        self.activation, self.dropout = activation, dropout

    def __call__(self, x: Tokens, key: jax.Array | None = None) -> Tokens:
        """(..., D), or (..., `inputs`) -> (..., D); or several such, without dropout."""
        keys = split(key, 2)

        def activate(y):
            y = ACTIVATIONS[self.activation](recompute.keep(y, recompute.HIDDEN))
            return dropout(y, self.dropout, keys[0])

        y = self.down(jax.tree.map(activate, self.up(x)))
        return jax.tree.map(lambda y: dropout(y, self.dropout, keys[1]), y)


class SqueezeExcite(nnx.Module):
    """Each channel times a gate in [0, 1]: a small MLP of all channels' means over the image (arXiv
    1709.01507).
    """

    def __init__(
        self,
        channels: int,
        hidden: int,
        activation: Callable,
        sigmoid: Callable,
        *,
        kernel_init: Callable,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(Linear, kernel_init=kernel_init, dtype=dtype, rngs=rngs)
        self.reduce, self.expand = linear(channels, hidden), linear(hidden, channels)
        self.activation, self.sigmoid = activation, sigmoid

    def __call__(self, x: jax.Array) -> jax.Array:
        """(B, H, W, C) -> the same."""
        gate = self.sigmoid(self.expand(self.activation(self.reduce(x.mean((1, 2))))))
        return x * gate[:, None, None]
