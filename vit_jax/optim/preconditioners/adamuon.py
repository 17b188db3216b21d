"""AdaMuon (arXiv 2507.11005): Muon with Adam's second moment."""

import jax.numpy as jnp
import optax

from vit_jax.optim.matrices import Matrices
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners.muon import normalized_momentum


def adamuon(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Orthogonalized momentum divided by the root of its own second moment, element by element; then each
    matrix gets the norm of Muon's update.
    """
    return normalized_momentum(config, matrices, lambda name, u: jnp.square(u))
