"""How PyTorch's layers keep their weights, as rules.

Weights of linear layers are (outputs, inputs), of convolutions (outputs, inputs, height, width).
"""

import math
from collections.abc import Sequence

import numpy as np

from vit_jax.interchange.conversions import rules


def linear(ours: str, theirs: str, first_layer: int = 0) -> list[rules.Rule]:
    """A linear layer."""
    return [
        rules.Rule(f"{ours}/kernel", f"{theirs}.weight", rules.transposed(1, 0), first_layer),
        rules.Rule(f"{ours}/bias", f"{theirs}.bias", first_layer=first_layer),
    ]


def norm(
    ours: str, theirs: str, first_layer: int = 0, transform: rules.Transform = rules.SAME
) -> list[rules.Rule]:
    """A layer norm or group norm."""
    return [
        rules.Rule(f"{ours}/scale", f"{theirs}.weight", transform, first_layer),
        rules.Rule(f"{ours}/bias", f"{theirs}.bias", transform, first_layer),
    ]


def batch_norm(
    ours: str, theirs: str, layers: range | None = None
) -> list[rules.Rule | rules.Constant]:
    """A batch norm with its running statistics, `mean` and `var` here.

    Args:
      layers: the numbers of the layers in their names, where these hold `{layer}`.
    """
    first_layer = layers[0] if layers else 0
    batches = f"{theirs}.num_batches_tracked"
    return [
        *norm(ours, theirs, first_layer),
        rules.Rule(f"{ours}/mean", f"{theirs}.running_mean", first_layer=first_layer),
        rules.Rule(f"{ours}/var", f"{theirs}.running_var", first_layer=first_layer),
        *(rules.Constant(batches.format(layer=i), np.int64(0)) for i in layers or (0,)),
    ]


def convolution(ours: str, theirs: str, first_layer: int = 0) -> rules.Rule:
    """The kernel of a convolution."""
    return rules.Rule(
        f"{ours}/kernel", f"{theirs}.weight", rules.transposed(2, 3, 1, 0), first_layer
    )


def flat_patches(config) -> rules.Transform:
    """From a linear layer's weight (D, P * P * C) to the kernel (P, P, C, D) of a ViT's patches."""
    shape = (config.patch, config.patch, config.channels)
    flat = (math.prod(shape), config.width)
    return rules.chain(rules.transposed(1, 0), rules.reshaped((*shape, config.width), flat))


def patches(ours: str, theirs: str) -> list[rules.Rule]:
    """A convolution with a bias, as patches are embedded by."""
    return [convolution(ours, theirs), rules.Rule(f"{ours}/bias", f"{theirs}.bias")]


def mlp(ours: str, theirs: str, first_layer: int = 0) -> list[rules.Rule]:
    """Two linear layers that timm calls `fc1` and `fc2`."""
    return [
        *linear(f"{ours}/up", f"{theirs}.fc1", first_layer),
        *linear(f"{ours}/down", f"{theirs}.fc2", first_layer),
    ]


def block(ours: str, theirs: str, width: int, heads: int, first_layer: int = 0) -> list[rules.Rule]:
    """A block of a ViT with timm's names: attention, then an MLP, each behind its norm."""
    return [
        *norm(f"{ours}/attention_norm", f"{theirs}.norm1", first_layer),
        *attention(
            f"{ours}/attention",
            (f"{theirs}.attn.qkv",),
            f"{theirs}.attn.proj",
            width,
            heads,
            first_layer,
        ),
        *norm(f"{ours}/mlp_norm", f"{theirs}.norm2", first_layer),
        *mlp(f"{ours}/mlp", f"{theirs}.mlp", first_layer),
    ]


def pointwise(ours: str, theirs: str, first_layer: int = 0) -> rules.Rule:
    """The kernel (inputs, outputs) of a 1x1 convolution."""
    transform = rules.chain(rules.expanded(2, 3), rules.transposed(1, 0))
    return rules.Rule(f"{ours}/kernel", f"{theirs}.weight", transform, first_layer)


def attention(
    ours: str,
    qkv: tuple[str, ...],
    out: str,
    width: int,
    heads: int,
    first_layer: int = 0,
    *,
    query_value_biases: tuple[str, str] | None = None,
    channels: Sequence[int] | None = None,
) -> list[rules.Rule]:
    """Attention whose queries, keys and values come from linear layers: one for all, or several one after the other.

    Args:
      ours: name of the `Attention`.
      qkv: the layers: one of (3D, D), or some that are together, such as a query's (D, D) and a (2D, D).
      out: the last layer.
      width: D.
      heads: their number; a head's channels follow each other.
      query_value_biases: the tensors of biases where keys have none; by default those of the layers.
      channels: the order of theirs in ours, in each head's queries and keys, see `rotary_channels`.
    """
    size = width // heads
    parts = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(qkv)]
    together = rules.joined(0, [part * width for part in parts])
    kernel = rules.chain(
        together,
        rules.transposed(1, 0),
        rules.reshaped((width, 3, heads, size), (width, 3 * width)),
    )
    biases, biased = tuple(f"{name}.bias" for name in qkv), 3
    if query_value_biases:
        biases, biased, together = query_value_biases, 2, rules.joined(0, [width, width])
    bias = rules.chain(together, rules.reshaped((biased, heads, size), (biased * width,)))
    if channels is not None:
        kernel = rules.chain(kernel, _leading(channels, 2, axis=1))
        bias = rules.chain(bias, _leading(channels, biased - 1, axis=0))
    out_kernel = rules.chain(
        rules.transposed(1, 0), rules.reshaped((heads, size, width), (width, width))
    )
    return [
        rules.Rule(
            f"{ours}/qkv/kernel", tuple(f"{name}.weight" for name in qkv), kernel, first_layer
        ),
        rules.Rule(f"{ours}/qkv/bias", biases, bias, first_layer),
        rules.Rule(f"{ours}/out/kernel", f"{out}.weight", out_kernel, first_layer),
        rules.Rule(f"{ours}/out/bias", f"{out}.bias", first_layer=first_layer),
    ]


def gated(ours: str, theirs: str | tuple[str, str]) -> list[rules.Rule]:
    """A `GatedLinear`, whose gate comes first: one layer of twice as many outputs, or two layers."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    halves = _in_halves if isinstance(theirs, str) else rules.stacked(0)
    return [
        rules.Rule(
            f"{ours}/kernel",
            tuple(f"{name}.weight" for name in names),
            rules.chain(halves, rules.transposed(2, 0, 1)),
        ),
        rules.Rule(f"{ours}/bias", tuple(f"{name}.bias" for name in names), halves),
    ]


# (2F, …) in theirs, (2, F, …) in ours.
_in_halves = rules.Transform(
    lambda xs: [x.reshape(2, -1, *x.shape[1:]) for x in xs],
    lambda xs: [x.reshape(-1, *x.shape[2:]) for x in xs],
)


def rotary_channels(size: int, *, columns_first: bool = False) -> np.ndarray:
    """The order of a head's channels, of which 2i and 2i + 1 are a pair in theirs, in ours, where i and
    i + size/2 are (`compute.rope`).

    Args:
      size: channels of a head.
      columns_first: whether theirs has channels that columns turn before those that rows turn.
    """
    pairs = np.arange(size // 2)
    if columns_first:
        pairs = np.roll(pairs, size // 4)
    return np.concatenate([2 * pairs, 2 * pairs + 1])


def _leading(order: Sequence[int], count: int, *, axis: int) -> rules.Transform:
    """Of the first `count` along `axis`, what lies along the last axis in another order."""

    def applied(order):
        def apply(arrays):
            first, rest = np.split(arrays[0], [count], axis)
            return [np.concatenate([np.take(first, order, -1), rest], axis)]

        return apply

    return rules.Transform(applied(np.asarray(order)), applied(np.argsort(order)))
