"""NorMuon (arXiv 2510.05491): Muon with a second moment for each output."""

import jax.numpy as jnp
import optax

from vit_jax.base import patterns
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners.muon import orthogonal_momentum, with_norm_of_muon


def normuon(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Orthogonalized momentum whose columns, the weights of an output, are divided by the root of the running
    mean of their squares; then each matrix gets the norm of Muon's update.
    """

    def squares(name, u):
        return jnp.mean(jnp.square(u), matrices.inner_axes(name, "i"), keepdims=True)

    def init(params):
        return patterns.map_named(lambda name, p: jnp.zeros_like(squares(name, p)), params)

    def update(us, second, params=None):
        second = optax.tree.update_moment(
            patterns.map_named(squares, us), second, config.matrix_b2, 1
        )

        def direction(name, u, v):
            u /= jnp.sqrt(v) + config.eps
            return with_norm_of_muon(config, matrices, name, u)

        return patterns.map_named(direction, us, second), second

    return optax.chain(
        orthogonal_momentum(config, matrices), optax.GradientTransformation(init, update)
    )
