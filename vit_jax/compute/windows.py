"""Overlapping windows of a map, each flattened to a vector."""

import jax
import jax.numpy as jnp


def soft_split(x: jax.Array, *, size: int, stride: int, padding: int) -> jax.Array:
    """Cuts a map into windows that overlap where `size` exceeds `stride` (T2T §3.1, "soft split").

    Args:
      x: (B, H, W, C), padded with zeros on all sides.
      size, stride, padding: of the windows, in places of the map, along both axes.

    Returns:
      (B, h, w, size² C), a window's places row by row, with `count_windows` giving h and w.
    """
    b, height, width, channels = x.shape
    rows, columns = (count_windows(n, size, stride, padding) for n in (height, width))
    # Two copies of the map: windows along rows, then along columns. Each is put together from as many
    # shifted views as strides make a window, instead of a gather for each of its places.
    x = _along(_along(x, rows, 1, size, stride, padding), columns, 3, size, stride, padding)
    x = x.transpose(0, 1, 3, 2, 4, 5)
    return x.reshape(b, rows, columns, size * size * channels)


def count_windows(length: int, size: int, stride: int, padding: int) -> int:
    """How many windows there are along an axis of `length` places."""
    return (length + 2 * padding - size) // stride + 1


def _along(x, windows, axis, size, stride, padding):
    """Splits `axis` into (windows, size)."""
    steps = -(-size // stride)
    needed = (windows - 1 + steps) * stride
    after = needed - padding - x.shape[axis]
    ends = [(0, 0, 0)] * x.ndim
    ends[axis] = (padding, after, 0)  # a negative `after` cuts off what no window reaches
    x = jax.lax.pad(x, jnp.zeros((), x.dtype), ends)
    shape = (*x.shape[:axis], needed // stride, stride, *x.shape[axis + 1 :])
    x = x.reshape(shape)
    parts = [
        jax.lax.slice_in_dim(x, step, step + windows, axis=axis)[
            (slice(None),) * (axis + 1) + (slice(0, min(stride, size - step * stride)),)
        ]
        for step in range(steps)
    ]
    return jnp.concatenate(parts, axis=axis + 1)
