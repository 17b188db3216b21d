"""How PyTorch's layers keep their weights, as rules.

Weights of linear layers are (outputs, inputs), of convolutions (outputs, inputs, height, width).
"""

import numpy as np

from vit_jax.models.conversions.rules import (
    Constant,
    Rule,
    chain,
    expanded,
    joined,
    reshaped,
    transposed,
)


def linear(ours: str, theirs: str, first_layer: int = 0) -> list[Rule]:
    """A linear layer."""
    return [
        Rule(f"{ours}/kernel", f"{theirs}.weight", transposed(1, 0), first_layer),
        Rule(f"{ours}/bias", f"{theirs}.bias", first_layer=first_layer),
    ]


def norm(ours: str, theirs: str, first_layer: int = 0) -> list[Rule]:
    """A layer norm or group norm."""
    return [
        Rule(f"{ours}/scale", f"{theirs}.weight", first_layer=first_layer),
        Rule(f"{ours}/bias", f"{theirs}.bias", first_layer=first_layer),
    ]


def batch_norm(ours: str, theirs: str, layers: range | None = None) -> list[Rule | Constant]:
    """A batch norm with its running statistics, `mean` and `var` here.

    Args:
      layers: the numbers of the layers in their names, where these hold `{layer}`.
    """
    first_layer = layers[0] if layers else 0
    batches = f"{theirs}.num_batches_tracked"
    return [
        *norm(ours, theirs, first_layer),
        Rule(f"{ours}/mean", f"{theirs}.running_mean", first_layer=first_layer),
        Rule(f"{ours}/var", f"{theirs}.running_var", first_layer=first_layer),
        *(Constant(batches.format(layer=i), np.int64(0)) for i in layers or (0,)),
    ]


def convolution(ours: str, theirs: str, first_layer: int = 0) -> Rule:
    """The kernel of a convolution."""
    return Rule(f"{ours}/kernel", f"{theirs}.weight", transposed(2, 3, 1, 0), first_layer)


def pointwise(ours: str, theirs: str, first_layer: int = 0) -> Rule:
    """The kernel (inputs, outputs) of a 1x1 convolution."""
    transform = chain(expanded(2, 3), transposed(1, 0))
    return Rule(f"{ours}/kernel", f"{theirs}.weight", transform, first_layer)


def attention(
    ours: str,
    qkv: tuple[str, ...],
    out: str,
    width: int,
    heads: int,
    first_layer: int = 0,
) -> list[Rule]:
    """Attention whose queries, keys and values come from linear layers: one for all, or several one after the other.

    Args:
      ours: name of the `Attention`.
      qkv: the layers: one of (3D, D), or some that are together, such as a query's (D, D) and a (2D, D).
      out: the last layer.
      width: D.
      heads: their number; a head's channels follow each other.
    """
    size = width // heads
    parts = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[len(qkv)]
    together = joined(0, [part * width for part in parts])
    kernel = chain(
        together, transposed(1, 0), reshaped((width, 3, heads, size), (width, 3 * width))
    )
    bias = chain(together, reshaped((3, heads, size), (3 * width,)))
    out_kernel = chain(transposed(1, 0), reshaped((heads, size, width), (width, width)))
    biases = tuple(f"{name}.bias" for name in qkv)
    return [
        Rule(f"{ours}/qkv/kernel", tuple(f"{name}.weight" for name in qkv), kernel, first_layer),
        Rule(f"{ours}/qkv/bias", biases, bias, first_layer),
        Rule(f"{ours}/out/kernel", f"{out}.weight", out_kernel, first_layer),
        Rule(f"{ours}/out/bias", f"{out}.bias", first_layer=first_layer),
    ]
