"""How Flax's layers keep their weights, as rules: those of vision_transformer and big_vision."""

import dataclasses
from collections.abc import Iterable

from vit_jax.interchange.conversions.rules import SAME, Rule, Transform, stacked


def affine(ours: str, theirs: str) -> list[Rule]:
    """A linear layer or a convolution with a bias."""
    return [Rule(f"{ours}/{part}", f"{theirs}/{part}") for part in ("kernel", "bias")]


def norm(
    ours: str,
    theirs: str,
    axes: Transform = SAME,
    names: tuple[str, str] = ("scale", "bias"),
    first_layer: int = 0,
) -> list[Rule]:
    """A layer norm or group norm."""
    pairs = zip(("scale", "bias"), names, strict=True)
    return [Rule(f"{ours}/{our}", f"{theirs}/{their}", axes, first_layer) for our, their in pairs]


def mlp(ours: str, theirs: str) -> list[Rule]:
    """Two linear layers."""
    return [
        *affine(f"{ours}/up", f"{theirs}/Dense_0"),
        *affine(f"{ours}/down", f"{theirs}/Dense_1"),
    ]


def attention(ours: str, theirs: str) -> list[Rule]:
    """query, key and value (D, H, C) become one qkv (D, 3, H, C)."""
    kernels, biases = (
        [f"{theirs}/{name}/{part}" for name in ("query", "key", "value")]
        for part in ("kernel", "bias")
    )
    return [
        Rule(f"{ours}/qkv/kernel", tuple(kernels), stacked(1)),
        Rule(f"{ours}/qkv/bias", tuple(biases), stacked(0)),
        *affine(f"{ours}/out", f"{theirs}/out"),
    ]


def stacked_blocks(rules: Iterable[Rule]) -> list[Rule]:
    """The rules of a file whose blocks are stacked, from those of one with a tensor for each block's."""
    return [
        dataclasses.replace(rule, theirs=tuple(n.replace("_{layer}", "") for n in rule.names))
        for rule in rules
    ]
