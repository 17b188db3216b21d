"""SOAP (arXiv 2409.11321): Adam in the eigenbases of the second moments of rows and columns.

The bases begin as the axes themselves, with which SOAP is Adam. Every `basis_every` steps they get
closer to the eigenvectors by a power step and a QR decomposition (Algorithm 4), which TPUs have faster
than `eigh`. With `matrix_eps` times its norm added, the moment leaves directions that are rounding alone
as they were.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.optim import blocks
from vit_jax.optim.blocks import product
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim


class SoapState(NamedTuple):
    """`stacks` has `left`, `right`, their bases, `mu`, and `nu`, which is in these bases."""

    count: jax.Array
    stacks: dict[str, blocks.Stack]


def soap(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """SOAP of blocks with sides up to `matrix_block`."""
    b1, b2, longest = config.matrix_b1, config.matrix_b2, config.matrix_block

    def of_block(m, n):
        bases = {"left_basis": jnp.eye(m), "right_basis": jnp.eye(n)}
        mu = jnp.zeros((m, n), config.moment_dtype)
        return blocks.moments(m, n) | bases | {"mu": mu, "nu": jnp.zeros((m, n))}

    def power_step(moment, basis):
        norm = jnp.linalg.norm(moment, axis=(-2, -1), keepdims=True)
        return jnp.linalg.qr(product(moment, basis) + config.matrix_eps * norm * basis)[0]

    def init(params):
        return SoapState(jnp.int32(0), blocks.init(matrices, longest, of_block))

    def update(grads, state, params=None):
        count = state.count + 1

        def precondition(arrays):
            # At the start of a step, so that bases that are not finite show in its own update.
            bases = blocks.refresh(state.count, config.basis_every, power_step, arrays, "basis")
            g = arrays["x"]
            left, right = bases["left_basis"], bases["right_basis"]
            mu = b1 * arrays["mu"].astype(jnp.float32) + (1 - b1) * g
            ahead = b1 * mu + (1 - b1) * g if config.nesterov else mu
            ahead, rotated = (product(product(left.mT, x), right) for x in (ahead, g))
            nu = b2 * arrays["nu"] + (1 - b2) * jnp.square(rotated)
            u = ahead / (1 - b1**count) / (jnp.sqrt(nu / (1 - b2**count)) + config.eps)
            new = blocks.update_moments(arrays, b2) | bases
            new |= {"mu": mu.astype(config.moment_dtype), "nu": nu}
            return new | {"x": product(product(left, u), right.mT)}

        us, stacks = blocks.apply(precondition, grads, state.stacks, matrices, longest)
        return us, SoapState(count, stacks)

    return optax.GradientTransformation(init, update)
