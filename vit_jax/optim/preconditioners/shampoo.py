"""Shampoo (arXiv 1802.09568, 2002.09018): gradients multiplied from both sides by inverse fourth roots of
their own second moments, as long as Adam's step ("grafting").

Moments follow the gradient of every step. Their roots, by eigendecomposition, are computed every
`matrix_every` steps; until the first of them the direction is Adam's. Momentum is that of NAdamW, of the
direction. The norm is replaced matrix by matrix, not block by block.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns
from vit_jax.optim import blocks
from vit_jax.optim.blocks import product
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.optimizers import keep
from vit_jax.optim.options import Optim


class ShampooState(NamedTuple):
    """`stacks` has `left`, `right` and their roots, see `blocks`."""

    count: jax.Array
    mu: Any
    nu: Any
    stacks: dict[str, blocks.Stack]


def shampoo(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Grafted Shampoo of blocks with sides up to `matrix_block`."""
    b1, b2, longest = config.matrix_b1, config.matrix_b2, config.matrix_block

    def of_block(m, n):
        moments = blocks.moments(m, n)
        return moments | {f"{side}_root": zeros for side, zeros in moments.items()}

    def root(moment, _):
        """Scale does not matter, since the norm is replaced: no correction of the running mean's bias."""
        values, vectors = jnp.linalg.eigh(moment)
        values = jnp.maximum(values, 0) + jnp.maximum(config.matrix_eps * values[..., -1:], 1e-30)
        return product(vectors * values[..., None, :] ** -0.25, vectors.mT)

    def init(params):
        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        state = blocks.init(matrices, longest, of_block)
        return ShampooState(jnp.int32(0), zeros, jax.tree.map(jnp.copy, zeros), state)

    def update(grads, state, params=None):
        count = state.count + 1
        nu = optax.tree.update_moment(grads, state.nu, b2, 2)
        second = optax.tree.bias_correction(nu, b2, count)
        adam = jax.tree.map(lambda g, v: g / (jnp.sqrt(v) + config.eps), grads, second)

        def precondition(arrays):
            new = blocks.update_moments(arrays, b2)
            new |= blocks.refresh(count, config.matrix_every, root, arrays | new, "root")
            x = product(product(new["left_root"], arrays["x"]), new["right_root"])
            return new | {"x": x}

        us, stacks = blocks.apply(precondition, grads, state.stacks, matrices, longest)

        def graft(name, u, a):
            grafted = u * matrices.norms(name, a) / jnp.maximum(matrices.norms(name, u), 1e-20)
            return jnp.where(count >= config.matrix_every, grafted, a)

        direction = patterns.map_named(graft, us, adam)
        mu = optax.tree.update_moment(direction, state.mu, b1, 1)
        ahead = optax.tree.update_moment(direction, mu, b1, 1) if config.nesterov else mu
        ahead = optax.tree.bias_correction(ahead, b1, count)
        return ahead, ShampooState(count, mu, nu, stacks)

    return keep(optax.GradientTransformation(init, update), "mu", config.moment_dtype)
