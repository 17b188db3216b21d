"""Shampoo (arXiv 1802.09568, 2002.09018): gradients multiplied from both sides by inverse fourth roots of
their own second moments, as long as Adam's step ("grafting").

Statistics follow the gradient of every step. Their roots, by eigendecomposition, are computed every
`matrix_every` steps; until the first of them the direction is Adam's. Momentum is that of NAdamW, of the
direction. The norm is replaced matrix by matrix, not block by block.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns
from vit_jax.base.errors import ConfigError
from vit_jax.optim import stacks
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim


class ShampooState(NamedTuple):
    """`stacks` has `left`, `right` and their roots (matrices, blocks, side, side) of each stack."""

    count: jax.Array
    mu: Any
    nu: Any
    stacks: dict[str, stacks.Stack]


def shampoo(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Grafted Shampoo of blocks with sides up to `matrix_block`."""
    b1, b2 = config.matrix_b1, config.matrix_b2

    def init(params):
        found = {}
        for shape, names in matrices.stacks().items():
            (p, m), (q, n) = (_blocks(side, config.matrix_block) for side in shape)
            count = sum(map(matrices.count, names))
            sides = {"left": m, "right": n, "left_root": m, "right_root": n}
            found[stacks.stack_name(shape)] = {
                name: jnp.zeros((count, p * q, side, side)) for name, side in sides.items()
            }
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        return ShampooState(jnp.int32(0), zeros, jax.tree.map(jnp.copy, zeros), found)

    def update(grads, state, params=None):
        count = state.count + 1
        refresh, started = count % config.matrix_every == 0, count >= config.matrix_every
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        second = optax.tree.bias_correction(nu, b2, count)
        adam = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + config.eps), grads, second)

        def of_stack(arrays: stacks.Stack) -> stacks.Stack:
            x, new = arrays["x"], {}
            g = _split(x, config.matrix_block)
            new["left"] = b2 * arrays["left"] + (1 - b2) * _product(g, g.mT)
            new["right"] = b2 * arrays["right"] + (1 - b2) * _product(g.mT, g)
            for side in ("left", "right"):
                new[f"{side}_root"] = jax.lax.cond(
                    refresh,
                    functools.partial(_inverse_fourth_root, epsilon=config.matrix_eps),
                    lambda _, old=arrays[f"{side}_root"]: old,
                    new[side],
                )
            g = _product(_product(new["left_root"], g), new["right_root"])
            return new | {"x": _join(g, x.shape)}

        preconditioned, found = stacks.apply_with_state(of_stack, grads, state.stacks, matrices)

        def graft(name, u, a):
            axes = matrices.inner_axes(name)
            ours, adams = (jnp.sqrt(jnp.sum(jnp.square(x), axes, keepdims=True)) for x in (u, a))
            return jnp.where(started, u * adams / jnp.maximum(ours, 1e-20), a)

        direction = patterns.map_named(graft, preconditioned, adam)
        mu = optax.tree.update_moment(direction, state.mu, b1, 1)
        ahead = optax.tree.update_moment(direction, mu, b1, 1) if config.nesterov else mu
        ahead = optax.tree.bias_correction(ahead, b1, count)
        return ahead, ShampooState(count, mu, nu, found)

    return optax.GradientTransformation(init, update)


def _blocks(side: int, largest: int) -> tuple[int, int]:
    """(number, side) of the fewest equal blocks of a side that are not above `largest`."""
    number = next(n for n in range(-(-side // largest), side + 1) if side % n == 0)
    if side // number < 4 <= side:
        raise ConfigError(
            f"config.optim.matrix_block = {largest}: a side of {side} has no divisor from 4 to that; set another"
        )
    return number, side // number


def _split(x: jax.Array, largest: int) -> jax.Array:
    """(N, p m, q n) to (N, p q, m, n)."""
    (p, m), (q, n) = (_blocks(side, largest) for side in x.shape[1:])
    return x.reshape(-1, p, m, q, n).swapaxes(2, 3).reshape(-1, p * q, m, n)


def _join(blocks: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The inverse of `_split`."""
    m, n = blocks.shape[2:]
    blocks = blocks.reshape(-1, shape[1] // m, shape[2] // n, m, n)
    return blocks.swapaxes(2, 3).reshape(shape)


def _inverse_fourth_root(x: jax.Array, *, epsilon: float) -> jax.Array:
    """Scale does not matter, since the norm is replaced: no correction of the running mean's bias."""
    values, vectors = jnp.linalg.eigh(x)
    values = jnp.maximum(values, 0) + jnp.maximum(epsilon * values[..., -1:], 1e-30)
    return _product(vectors * values[..., None, :] ** -0.25, vectors.mT)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
