"""Depth-wise convolution: each channel with a kernel of its own."""

import jax

from vit_jax.compute import choices


@choices.by_platform
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
