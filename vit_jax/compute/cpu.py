"""What CPUs compute their own way: products and stacks of bfloat16, which XLA's CPU back end would
convert to float32; depth-wise convolutions, for which it has no fast code; several sums of one pass.
"""

import itertools
import math
import operator
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from vit_jax.compute import convolution, digests, recompute
from vit_jax.compute import dense as plain


@plain.dense.on("cpu")
def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array | None) -> jax.Array:
    """XLA's CPU back end has fast products (of YNNPACK) only where the left operand is summed over its
    last axes, and in bfloat16 only where the result is float32: else it converts to float32 first. So
    each product is written that way here, also those of the backward pass, which automatic
    differentiation would write otherwise; and it would sum the bias's gradient in bfloat16.
    """
    if x.dtype not in (jnp.bfloat16, jnp.float32):
        return plain.dense.plain(x, kernel, bias)
    bias = jnp.zeros(kernel.shape[1:]) if bias is None else bias
    return _dense(x, kernel, bias)


@plain.product.on("cpu")
def product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Batched products of matrices in float32 have their batch first and their operands as they come:
    `einsum` exchanges them to save a transpose of the result, and then takes a third longer.
    """
    operands, result = formula.split("->")
    left, right = operands.split(",")
    batch = [axis for axis in result if axis in left and axis in right]
    rows = sorted(set(left) - set(right))
    columns = sorted(set(right) - set(left))
    summed = sorted(set(left) & set(right) - set(batch))
    if a.dtype != jnp.float32 or not batch or [len(rows), len(columns), len(summed)] != [1, 1, 1]:
        return plain.product.plain(formula, a, b)
    a, left = _batch_first(a, left, batch)
    b, right = _batch_first(b, right, batch)
    axes = ((left.index(*summed),), (right.index(*summed),))
    leading = tuple(range(len(batch)))
    outcome = jax.lax.dot_general(a, b, (axes, (leading, leading)))
    order = [*batch, *rows, *columns]
    return outcome.transpose([order.index(axis) for axis in result])


@recompute.named.on("cpu")
def named(x: jax.Array, name: str) -> jax.Array:
    """XLA's CPU back end stacks the bfloat16 arrays of a loop by converting the whole stack to
    float32 and back in every round; integers it leaves alone.
    """
    if x.dtype != jnp.bfloat16:
        return checkpoint_name(x, name)
    bits = checkpoint_name(jax.lax.bitcast_convert_type(x, jnp.uint16), name)
    return jax.lax.bitcast_convert_type(bits, x.dtype)


@convolution.depthwise.on("cpu")
def depthwise(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    """XLA's CPU back end takes ten times as long for the convolution, forward and backward, as for the
    sum of shifted maps; in float32 either way.
    """
    if stride == 1:
        return _depthwise(x, kernel)
    size, area = kernel.shape[0], x.shape[1:3]
    pads = jax.lax.padtype_to_pads(area, (size, size), (stride, stride), "SAME")
    padded = jnp.pad(x.astype(jnp.promote_types(x.dtype, jnp.float32)), ((0, 0), *pads, (0, 0)))
    # From the first place that a kernel's element meets to just after the last.
    height, width = (stride * (-(-length // stride) - 1) + 1 for length in area)
    shifted = (
        padded[:, i : i + height : stride, j : j + width : stride] * kernel[i, j, 0]
        for i in range(size)
        for j in range(size)
    )
    return sum(shifted).astype(x.dtype)


@jax.custom_vjp
def _depthwise(x, kernel):
    """`depthwise` with stride 1, row by row: a loop keeps XLA from computing what x comes from once more for
    each element of the kernel, and the result for each of its uses.
    """
    return _rows(_surrounded(x, kernel), kernel).astype(x.dtype)


def _depthwise_backward(saved, dy):
    x, kernel = saved
    padded, dy_padded = _surrounded(x, kernel), _surrounded(dy, kernel)
    dx = _rows(dy_padded, kernel[::-1, ::-1])
    return dx.astype(x.dtype), _depthwise_dkernel(padded, dy_padded, kernel)


_depthwise.defvjp(lambda x, kernel: (_depthwise(x, kernel), (x, kernel)), _depthwise_backward)


def _surrounded(x, kernel):
    """x in float32 with as many zeros around it as the kernel reaches beyond."""
    around = (kernel.shape[0] // 2,) * 2
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return jnp.pad(wide, ((0, 0), around, around, (0, 0)))


def _rows(padded, kernel):
    """The sum of shifted maps."""
    taps = list(itertools.product(range(kernel.shape[0]), repeat=2))
    batch, height, width, channels = padded.shape
    height, width = height - len(kernel) + 1, width - len(kernel) + 1

    def add_row(row, out):
        shifted = (
            jax.lax.dynamic_slice(padded, (0, row + i, j, 0), (batch, 1, width, channels))
            for i, j in taps
        )
        sums = sum(x * kernel[i, j, 0] for x, (i, j) in zip(shifted, taps, strict=True))
        return jax.lax.dynamic_update_slice_in_dim(out, sums, row, 1)

    # All of it is overwritten. Not zeros: XLA would copy those of all such loops before the first begins.
    middle = kernel.shape[0] // 2
    pixel = jax.lax.optimization_barrier(padded)[:, middle, middle, None, None]
    out = jnp.broadcast_to(pixel, (batch, height, width, channels))
    return jax.lax.fori_loop(0, height, add_row, out)


def _depthwise_dkernel(padded, dy_padded, kernel):
    """Products are summed over rows first, all columns side by side: a sum to the channels alone takes ten times
    as long.
    """
    size = len(kernel)
    taps = list(itertools.product(range(size), repeat=2))
    batch, height, width, channels = padded.shape
    height, width = height - size + 1, width - size + 1

    def row_of(x, row, column):
        return jax.lax.dynamic_slice(x, (0, row, column, 0), (batch, 1, width, channels))

    def add_row(row, sums):
        dy = row_of(dy_padded, row + size // 2, size // 2)
        return [
            total + row_of(padded, row + i, j) * dy
            for total, (i, j) in zip(sums, taps, strict=True)
        ]

    zeros = jnp.zeros((batch, 1, width, channels), padded.dtype)
    sums = jax.lax.fori_loop(0, height, add_row, [zeros] * len(taps))
    return jnp.stack([x.sum((0, 1, 2)) for x in sums]).reshape(kernel.shape)


@convolution.local.on("cpu")
def local(x: jax.Array, kernels: jax.Array) -> jax.Array:
    """In a loop over the kernels' rows, see `_depthwise`."""
    size = len(kernels)
    padded = jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(size // 2, size // 2)] * 2)
    before = (0,) * (x.ndim - 2)

    def add_row(row, total):
        columns = (
            jax.lax.dynamic_slice(padded, (*before, row, j), x.shape) * kernels[row, j]
            for j in range(size)
        )
        return total + sum(columns)

    shape = jnp.broadcast_shapes(x.shape, kernels.shape[2:])
    return jax.lax.fori_loop(0, size, add_row, jnp.zeros(shape, x.dtype))


def _batch_first(x: jax.Array, axes: str, batch: list[str]) -> tuple[jax.Array, list[str]]:
    order = [*batch, *(axis for axis in axes if axis not in batch)]
    return x.transpose([axes.index(axis) for axis in order]), order


@jax.custom_vjp
def _dense(x, kernel, bias):
    return _dense_forward(x, kernel, bias)[0]


def _dense_forward(x, kernel, bias):
    rounded = kernel.astype(x.dtype)
    y = _contract(x, rounded, [x.ndim - 1], [0]) + bias
    return y.astype(x.dtype), (x, rounded)


def _dense_backward(saved, dy):
    x, kernel = saved
    tokens = tuple(range(x.ndim - 1))
    dx = _contract(dy, kernel, range(x.ndim - 1, dy.ndim), range(1, kernel.ndim))
    dbias = jnp.sum(dy, tokens, dtype=jnp.float32)
    return dx.astype(x.dtype), _dkernel(x, dy), dbias


_dense.defvjp(_dense_forward, _dense_backward)


def _dkernel(x, dy):
    """x (..., D), dy (..., *F) -> (D, *F). The narrower of the two is transposed before the
    product, since XLA does not fold a contraction over several axes into it.
    """
    tokens, tokens_moved = range(x.ndim - 1), range(1, x.ndim)
    features = dy.shape[x.ndim - 1 :]
    if math.prod(features) >= x.shape[-1] or x.shape[-1] % 2:
        return _contract(jnp.moveaxis(x, -1, 0), dy, tokens_moved, tokens)
    dy = dy.reshape(*x.shape[:-1], -1)
    product = _contract(jnp.moveaxis(dy, -1, 0), x, tokens_moved, tokens)
    # Over three axes: XLA would undo a plain transpose by moving x after all.
    halves = product.reshape(len(product), 2, -1).transpose(1, 2, 0)
    return halves.reshape(x.shape[-1], *features)


def _contract(a, b, axes_of_a, axes_of_b):
    contracted = (tuple(axes_of_a), tuple(axes_of_b))
    return jax.lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


@digests.total.on("cpu")
def total(terms: Sequence[jax.Array]) -> jax.Array:
    """One loop for all of them, where XLA's CPU back end makes a loop of each: a state has hundreds of arrays,
    and three loops of each were most of what it takes to compile an audit.
    """
    zeros = tuple(jnp.uint32(0) for _ in terms)
    add = lambda sums, others: tuple(map(operator.add, sums, others))  # noqa: E731
    return jnp.stack(jax.lax.reduce(tuple(terms), zeros, add, tuple(range(terms[0].ndim))))
