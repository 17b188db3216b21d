"""The factored second moment of Scaling ViT's Adafactor. Its momentum is in `optimizers.py`, as
that of the others.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns

MIN_FACTORED = 32
EPSILON = 1e-30


class Factored(NamedTuple):
    """Running means of the squared gradient over the larger (`rows`) and the smaller factored axis
    (`columns`).
    """

    rows: jax.Array
    columns: jax.Array


class AdafactorState(NamedTuple):
    """`second` is the tree of the parameters, each leaf a `Factored` or an array of the parameter's
    own shape.
    """

    count: jax.Array
    second: Any


def scale_by_adafactor(cap: float) -> optax.GradientTransformation:
    """Divides gradients by the root of a factored running mean of their squares (Shazeer & Stern
    2018, Algorithm 4).

    The variant of Scaling ViT §3.4: decay min(cap, 1 - t^-0.8) at the t-th update, t = 1, 2, …; no
    update clipping, no relative step size, no scaling by the parameter's size. See `factored_axes`
    for what is factored.

    Args:
      cap: largest decay of the second moment.
    """

    def init(params):
        def zeros(name, p):
            axes = factored_axes(name, p.shape)
            if axes is None:
                return jnp.zeros_like(p, jnp.float32)
            return Factored(
                *(jnp.zeros(p.shape[:axis] + p.shape[axis + 1 :], jnp.float32) for axis in axes)
            )

        return AdafactorState(jnp.zeros([], jnp.int32), patterns.map_named(zeros, params))

    def update(grads, state, params=None):
        count = state.count + 1
        decay = jnp.minimum(cap, 1 - count.astype(jnp.float32) ** -0.8)

        def moment(name, g, second):
            square = jnp.square(g) + EPSILON
            axes = factored_axes(name, g.shape)
            if axes is None:
                return decay * second + (1 - decay) * square
            means = (square.mean(axis) for axis in axes)
            return Factored(
                *(decay * v + (1 - decay) * mean for v, mean in zip(second, means, strict=True))
            )

        def direction(name, g, second):
            axes = factored_axes(name, g.shape)
            if axes is None:
                return g * jax.lax.rsqrt(second)
            larger, smaller = axes
            rows = jnp.expand_dims(second.rows, larger)
            columns = jnp.expand_dims(second.columns, smaller)
            # Two roots, not one of the product: squares of small gradients multiplied would
            # underflow float32.
            share = rows / rows.mean(smaller, keepdims=True)
            return g * jax.lax.rsqrt(share) * jax.lax.rsqrt(columns)

        second = patterns.map_named(moment, grads, state.second)
        return patterns.map_named(direction, grads, second), AdafactorState(count, second)

    return optax.GradientTransformation(init, update)


def factored_axes(name: str, shape: tuple[int, ...]) -> tuple[int, int] | None:
    """The (larger, smaller) axis of the matrices whose second moment is kept as rows and columns;
    `None`: kept in full.

    They are the two largest axes (of equal ones the later counts as the larger) where both are at
    least 32 long. The layer axis of a stacked parameter is never one of them, so that each layer is
    treated as if it were alone.
    All other axes count matrices too: the joint kernel (D, 3, heads, head size) of queries, keys
    and values is 3 x heads matrices (D, head size), just as three separate kernels (D, heads, head
    size) are in big_vision.
    """
    first = int(patterns.is_stacked(name))
    axes = sorted(range(first, len(shape)), key=lambda axis: shape[axis])
    if len(axes) < 2 or shape[axes[-2]] < MIN_FACTORED:
        return None
    return axes[-1], axes[-2]
