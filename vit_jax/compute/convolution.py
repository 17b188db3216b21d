"""Depth-wise convolution, each channel with a kernel of its own; one with a kernel for each place; and standardised
kernels (arXiv 1903.10520).
"""

import jax
import jax.numpy as jnp

from vit_jax.compute.platform import by_platform


@by_platform
def depthwise(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """x (B, H, W, C), kernel (S, S, 1, C) float32 -> (B, H / stride, W / stride, C), rounded up, in x's
    dtype.

    S is odd. Zeros around x are TensorFlow's SAME: S // 2 on each side with stride 1; where a stride needs
    an odd number of them, one more at the end.
    """
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (stride, stride),
        "SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )


@by_platform
def local(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """x (…, H, W) with zeros around it, and a kernel for each place, kernels (S, S, H, W), S odd -> (…, H, W). Leading
    axes of both are broadcast: kernels (S, S, N, H, W).
    """
    size, (height, width) = len(kernels), x.shape[-2:]
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(size // 2, size // 2)] * 2)
    return sum(
        kernels[i, j] * padded[..., i : i + height, j : j + width]
        for i in range(size)
        for j in range(size)
    )


def standardize(kernel: jax.Array, preactivation: bool, epsilons: str = "official") -> jax.Array:
    """kernel (h, w, inputs, outputs) with mean 0 and variance 1 for each output, up to an epsilon
    that each style, and these 'official' or 'timm' `epsilons`, adds in its own way.
    """
    centred = kernel - kernel.mean(axis=(0, 1, 2))
    variance = jnp.square(centred).mean(axis=(0, 1, 2))
    if epsilons == "timm":
        return centred / jnp.sqrt(variance + 1e-8)
    return centred / (jnp.sqrt(variance + 1e-10) if preactivation else jnp.sqrt(variance) + 1e-5)
