"""Depth-wise convolution: each channel with a kernel of its own."""

import jax

from vit_jax.compute import choices


@choices.by_platform
def depthwise(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """x (B, H, W, C), kernel (S, S, 1, C) float32 -> the like of x, around which are S // 2 zeros; S is
    odd.
    """
    pad = kernel.shape[0] // 2
    return jax.lax.conv_general_dilated(
        x,
        kernel.astype(x.dtype),
        (1, 1),
        ((pad, pad), (pad, pad)),
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=x.shape[-1],
    )
