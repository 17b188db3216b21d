"""NorMuon (arXiv 2510.05491): Muon with a second moment for each output."""

import jax.numpy as jnp
import optax

from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners.muon import normalized_momentum


def normuon(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Orthogonalized momentum whose columns, the weights of an output, are divided by the root of the running
    mean of their squares; then each matrix gets the norm of Muon's update.
    """

    def mean_squares(name, u):
        return jnp.mean(jnp.square(u), matrices.inner_axes(name, "i"), keepdims=True)

    return normalized_momentum(config, matrices, mean_squares)
