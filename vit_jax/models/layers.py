"""What families share: linear layers, norm, MLP and a gate of channels. Attention is next door."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from vit_jax.compute import norms, recompute
from vit_jax.compute.activations import ACTIVATIONS
from vit_jax.compute.dense import dense
from vit_jax.compute.dropout import dropout, split


class Linear(nnx.Linear):
    """`nnx.Linear` by `dense`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> (..., F) in the layer's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return dense(x.astype(self.dtype), self.kernel[...], bias)


class GatedLinear(nnx.Module):
    """Two linear layers of the same input, a gate and what it multiplies, with one `kernel` (D, 2, F)
    and one `bias` (2, F).
    """

    def __init__(
        self,
        inputs: int,
        outputs: int,
        *,
        bias: bool,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        init = nnx.initializers.xavier_uniform(in_axis=0, out_axis=2, batch_axis=1)
        self.kernel = nnx.Param(init(rngs.params(), (inputs, 2, outputs)))
        draw = nnx.initializers.normal(1e-6)
        self.bias = nnx.Param(draw(rngs.params(), (2, outputs))) if bias else None
        self.dtype = dtype

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(..., D) -> twice (..., F), the gate first."""
        x = x.astype(self.dtype)
        kernel, bias = self.kernel[...], None if self.bias is None else self.bias[...]
        gate, up = (dense(x, kernel[:, i], None if bias is None else bias[i]) for i in (0, 1))
        return gate, up


class Kernel(nnx.Module):
    """The kernel of a layer without bias."""

    def __init__(self, init: Callable, shape: tuple[int, ...], rngs: nnx.Rngs):
        self.kernel = nnx.Param(init(rngs.params(), shape))


class LayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` by `norms.layer_norm`."""

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> the same in the norm's dtype."""
        bias = None if self.bias is None else self.bias[...]
        return norms.layer_norm(x, self.scale[...], bias, epsilon=self.epsilon, dtype=self.dtype)

    def product(self, x: jax.Array, vectors: jax.Array) -> jax.Array:
        """(B, N, Q) float32: of each token x (B, N, D), normed, with each of the vectors (B, Q, D)."""
        scale, bias = self.scale[...], self.bias[...]
        return norms.layer_norm_product(x, scale, bias, vectors, epsilon=self.epsilon)


def layer_norm(
    width: int, epsilon: float, dtype: jax.typing.DTypeLike, rngs: nnx.Rngs, *, bias: bool = True
) -> LayerNorm:
    """Layer norm over the last axis, its statistics in float32 whatever `dtype`."""
    return LayerNorm(width, epsilon=epsilon, use_bias=bias, dtype=dtype, rngs=rngs)


class RMSNorm(nnx.Module):
    """`norms.rms_norm` over the last axis of (..., D); parameter `scale` (D,)."""

    def __init__(self, width: int, *, epsilon: float, dtype: jax.typing.DTypeLike):
        self.scale = nnx.Param(jnp.ones((width,)))
        self.epsilon, self.dtype = epsilon, dtype

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> the same in the norm's dtype."""
        return norms.rms_norm(x, self.scale[...], epsilon=self.epsilon, dtype=self.dtype)


NORMS = ("layer", "rms")


def norm(
    kind: str,
    width: int,
    epsilon: float,
    dtype: jax.typing.DTypeLike,
    rngs: nnx.Rngs,
    *,
    bias: bool = True,
) -> LayerNorm | RMSNorm:
    """A norm of one of `NORMS`; `bias` is of a layer norm, the other has none."""
    if kind == "rms":
        return RMSNorm(width, epsilon=epsilon, dtype=dtype)
    return layer_norm(width, epsilon, dtype, rngs, bias=bias)


class LayerScale(nnx.Module):
    """What a residual branch gives, times a learned number for each channel, `scale` (D,) (CaiT,
    arXiv 2103.17239 §2.1).
    """

    def __init__(self, width: int, initial: float):
        self.scale = nnx.Param(jnp.full((width,), initial))

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., D) -> the same."""
        return x * self.scale[...].astype(x.dtype)


def draw_kernels(module: nnx.Module, std: float, rngs: nnx.Rngs) -> None:
    """Draws every `kernel` of a module again, from a normal distribution: how PyTorch's transformers
    usually begin (`trunc_normal_`, whose bounds of ±2 cut nothing).
    """
    for path, parameter in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        if path[-1] == "kernel":
            value = std * jax.random.normal(rngs.params(), parameter.shape)
            parameter.set_value(value)


def draw_as_deit(model: nnx.Module, rngs: nnx.Rngs) -> None:
    """Draws the weights of a ViT as DeiT's code does: kernels of the blocks and learned tokens as
    `draw_kernels`, patch embedding as PyTorch's convolutions begin, uniform up to 1 / sqrt(inputs).
    """
    draw_kernels(model.encoder, 0.02, rngs)
    for name in ("class_token", "registers"):
        if (token := getattr(model, name, None)) is not None:
            token.set_value(0.02 * jax.random.normal(rngs.params(), token.shape))
    kernel, bias = model.embedding.kernel, model.embedding.bias
    bound = math.prod(kernel.shape[:-1]) ** -0.5
    for parameter in (kernel, bias) if bias is not None else (kernel,):
        uniform = jax.random.uniform(rngs.params(), parameter.shape, minval=-bound, maxval=bound)
        parameter.set_value(uniform)


class Mlp(nnx.Module):
    """Dense, activation, dropout, dense, dropout (ViT Eq. 3); kernels Xavier-uniform, biases
    normal(1e-6).

    With `gated` the first layer gives twice as many, and the activation of one half multiplies the
    other (arXiv 2002.05202; with silu SwiGLU). `inner_norm` makes the norm of what the last layer gets,
    of a width.
    """

    def __init__(
        self,
        width: int,
        hidden: int,
        *,
        inputs: int | None = None,
        activation: str,
        dropout: float,
        gated: bool = False,
        bias: bool = True,
        inner_norm: Callable[[int], nnx.Module] | None = None,
        dtype: jax.typing.DTypeLike,
        rngs: nnx.Rngs,
    ):
        linear = functools.partial(
            Linear,
            use_bias=bias,
            kernel_init=nnx.initializers.xavier_uniform(),
            bias_init=nnx.initializers.normal(1e-6),
            dtype=dtype,
            rngs=rngs,
        )
        if gated:
            self.up = GatedLinear(inputs or width, hidden, bias=bias, dtype=dtype, rngs=rngs)
        else:
            self.up = linear(inputs or width, hidden)
        self.down = linear(hidden, width)
        self.norm = inner_norm(hidden) if inner_norm else None
        self.activation, self.dropout, self.gated = activation, dropout, gated

    def __call__(self, x: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """(..., D), or (..., `inputs`) -> (..., D)."""
        keys = split(key, 2)

        def activate(y, factor=None):
            y = ACTIVATIONS[self.activation](recompute.keep(y, recompute.HIDDEN))
            if factor is not None:
                y = y * recompute.keep(factor, recompute.HIDDEN)
            return dropout(y, self.dropout, keys[0])

        y = self.up(x)
        y = activate(*y) if self.gated else activate(y)
        y = self.down(y if self.norm is None else self.norm(y))
        return dropout(y, self.dropout, keys[1])


def mlp_flops(tokens: int, width: int, hidden: int, *, gated: bool = False) -> int:
    """Operations of an MLP, a multiply-add counted as 2."""
    return (6 if gated else 4) * tokens * width * hidden


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
