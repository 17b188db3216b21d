"""Sharpness-aware training: the gradient is taken where the loss nearby is about the highest, so that flat
minima are found (SAM, arXiv 2010.01412; GSAM, arXiv 2203.08065, Algorithm 1, as big_vision has it).

Not an optimizer: whichever there is gets this gradient in the place of the usual one.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.errors import ConfigError
from vit_jax.optim.options import Optim, takes_two_gradients

_TINY = 1e-12  # instead of a norm of 0


def check(config: Optim) -> None:
    """Raises `ConfigError` for options that do not go together."""
    low, high = config.sam_rho
    if low > high:
        raise ConfigError(
            f"config.optim.sam_rho = {config.sam_rho!r}: first the radius at lr_end, then that at lr, which is not "
            "the smaller one"
        )
    if config.sam_alpha and not takes_two_gradients(config):
        raise ConfigError(
            f"config.optim.sam_alpha = {config.sam_alpha} has no use without config.optim.sam_rho, "
            "e.g. (0.1, 0.6)"
        )


def radius(config: Optim, learning_rate: jax.typing.ArrayLike) -> jax.Array:
    """ρ at a learning rate: linear in it between those at `lr_end` and at `lr`; in warm-up it may be below both,
    and never below 0.
    """
    low, high = config.sam_rho
    if config.lr == config.lr_end:
        return jnp.asarray(high)
    share = (learning_rate - config.lr_end) / (config.lr - config.lr_end)
    return jnp.maximum(low + (high - low) * share, 0)


def aware(gradient_of: Callable, config: Optim, rho: jax.typing.ArrayLike) -> Callable:
    """A function like `gradient_of` that gives the gradient of GSAM, or with `sam_alpha` = 0 of SAM.

    With g the gradient at the parameters p and h that at p + ρ g / ‖g‖, it is h − α g⊥, g⊥ being the part of g
    that is orthogonal to h. Norms and products are those of all parameters together, of the whole batch.

    Only `params` are moved: a teacher, also one that follows the student, stays where it is, so that both gradients
    are towards the same answers.

    Args:
      gradient_of: (params, *rest) -> (gradients, anything else). All but the gradients of the result is what it
        gives at the parameters themselves: the loss that is reported; running statistics and centres, which so
        move once in a step, by what the network that is kept has computed.
      config: `config.optim`.
      rho: ρ, see `radius`.
    """

    def sharp(params: Any, *rest: Any) -> tuple[Any, Any]:
        grads, others = gradient_of(params, *rest)
        step = rho / (optax.tree.norm(grads) + _TINY)
        highest = jax.tree.map(lambda p, g: p + step * g, params, grads)
        robust, _ = gradient_of(highest, *rest)
        if config.sam_alpha:
            share = _dot(grads, robust) / (_dot(robust, robust) + _TINY**2)
            robust = jax.tree.map(
                lambda h, g: h - config.sam_alpha * (g - share * h), robust, grads
            )
        return robust, others

    return sharp


def _dot(a: Any, b: Any) -> jax.Array:
    """The inner product of two trees; without matrix products, which some devices round."""
    return sum(jax.tree.leaves(jax.tree.map(lambda x, y: jnp.sum(x * y), a, b)))
