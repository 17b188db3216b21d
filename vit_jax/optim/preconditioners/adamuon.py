"""AdaMuon (arXiv 2507.11005): Muon with Adam's second moment."""

import jax
import jax.numpy as jnp
import optax

from vit_jax.base import patterns
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners.muon import orthogonal_momentum, with_norm_of_muon


def adamuon(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Orthogonalized momentum divided by the root of its own second moment, element by element; then each
    matrix gets the norm of Muon's update.
    """

    def init(params):
        return jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)

    def update(us, second, params=None):
        second = optax.tree.update_moment(us, second, config.matrix_b2, 2)

        def direction(name, u, v):
            u /= jnp.sqrt(v) + config.eps
            return with_norm_of_muon(config, matrices, name, u)

        return patterns.map_named(direction, us, second), second

    return optax.chain(
        orthogonal_momentum(config, matrices), optax.GradientTransformation(init, update)
    )
