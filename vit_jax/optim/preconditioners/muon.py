"""Muon (kellerjordan.github.io/posts/muon): momentum whose singular values are all made about 1. What
its relatives share with it is here too.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from vit_jax.base import patterns
from vit_jax.compute import choices, platform
from vit_jax.optim import stacks
from vit_jax.optim.matrices import Matrices
from vit_jax.optim.optimizers import keep
from vit_jax.optim.options import Optim
from vit_jax.optim.preconditioners import newton_schulz

_RMS = 0.2  # of an update of AdamW, by measurement (arXiv 2502.16982 §2.2)


def muon(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Orthogonalized momentum times a factor of the matrix's shape."""

    def scale(name: str, u: jax.Array) -> jax.Array:
        return scale_of(config, *matrices.size(name)) * u

    scaled = optax.stateless(lambda us, _: patterns.map_named(scale, us))
    return optax.chain(orthogonal_momentum(config, matrices), scaled)


def orthogonal_momentum(config: Optim, matrices: Matrices) -> optax.GradientTransformation:
    """Gradients to momentum, of which each matrix is orthogonalized."""
    orthogonalized = optax.stateless(
        lambda us, _: stacks.apply(
            lambda x: newton_schulz.orthogonalize(x, config.polynomial),
            us,
            matrices,
            dtype=products_dtype(config),
        )
    )
    return optax.chain(momentum(config), orthogonalized)


def normalized_momentum(
    config: Optim, matrices: Matrices, squares: Callable[[str, jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Orthogonalized momentum divided by the root of a running mean of its squares; then each matrix gets the
    Frobenius norm that it has in `muon`: by default a root mean square of 0.2.

    Args:
      squares: (name, update) -> the squares of a parameter's elements, or their means over some of its axes.
    """

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


def momentum(config: Optim) -> optax.GradientTransformation:
    """m <- b m + (1 - b) g; gives m, or with Nesterov's b m + (1 - b) g."""
    b = config.matrix_b1

    def update(grads, state, params=None):
        m = optax.tree.update_moment(grads, state.ema, b, 1)
        ahead = optax.tree.update_moment(grads, m, b, 1) if config.nesterov else m
        return ahead, optax.EmaState(state.count, m)

    init = optax.ema(b, debias=False).init
    return keep(optax.GradientTransformation(init, update), "ema", config.moment_dtype)


def scale_of(config: Optim, inputs: int, outputs: int) -> float:
    """What an orthogonal matrix is multiplied by: so that its elements are as large as those of AdamW's
    update (arXiv 2502.16982 §2.2), or as in the original.
    """
    if config.matrix_scale == "original":
        return float(np.sqrt(max(1, outputs / inputs)))
    return float(_RMS * np.sqrt(max(inputs, outputs)))


def with_norm_of_muon(config: Optim, matrices: Matrices, name: str, u: jax.Array) -> jax.Array:
    """A parameter's update whose matrices get the Frobenius norm that an orthogonal one has in `muon`:
    by default a root mean square of 0.2.
    """
    inputs, outputs = matrices.size(name)
    target = scale_of(config, inputs, outputs) * np.sqrt(min(inputs, outputs))
    return u * (target / jnp.maximum(matrices.norms(name, u), 1e-20))


def products_dtype(config: Optim) -> jnp.dtype:
    """In which matrices are multiplied; a CPU that would emulate bfloat16 takes float32."""
    emulated = platform.current() == "cpu" and not choices.multiplies_bfloat16()
    stated = jnp.dtype(config.matrix_dtype)
    return jnp.dtype("float32") if emulated else stated
