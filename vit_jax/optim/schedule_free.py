"""Schedule-free AdamW (Defazio et al. 2024, arXiv 2405.15682): a running mean of the parameters takes the
place of a learning rate that falls, so that no run has to know its end.

There are three points: z, which the updates move; x, the mean of all z so far, which is evaluated; and y
between them, where the gradient is taken, the parameters of the training state. x is the average that the
training state keeps, as Polyak averaging's.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from vit_jax.base.errors import ConfigError
from vit_jax.optim.options import Optim
from vit_jax.optim.schedules import Schedule


class ScheduleFreeState(NamedTuple):
    """`weight` is the sum of the weights of all z in the mean, `inner` the state of what moves `z`."""

    count: jax.Array
    weight: jax.Array
    inner: Any
    z: Any


def check(config: Optim, cooldown: int) -> None:
    """Raises `ConfigError` for options that do not go together; `cooldown` is in steps."""
    if config.schedule != "constant" or cooldown:
        raise ConfigError(
            f"config.optim.schedule = {config.schedule!r}, cooldown = {config.cooldown!r}: "
            "config.optim.name='schedule_free' keeps the learning rate after warm-up; set "
            "--config.optim.schedule=constant and --config.optim.cooldown='0 steps'"
        )
    if config.weight_decay_end is not None:
        raise ConfigError(
            f"config.optim.weight_decay_end = {config.weight_decay_end} is a schedule too, and "
            "config.optim.name='schedule_free' has none: unset it"
        )
    if config.late:
        raise ConfigError(
            f"config.optim.late = {config.late!r}: config.optim.name='schedule_free' has one warm-up for all "
            "parameters; set late to ()"
        )
    if config.ema:
        raise ConfigError(
            f"config.optim.ema = {config.ema}: config.optim.name='schedule_free' averages parameters itself; "
            "set --config.optim.ema=0"
        )
    if not config.b1:
        raise ConfigError(
            "config.optim.b1 = 0.0: config.optim.name='schedule_free' takes the gradient at "
            "(1 - b1) z + b1 x, and needs b1 above 0"
        )


def averaged(
    inner: optax.GradientTransformation, relative: Schedule, config: Optim
) -> optax.GradientTransformation:
    """Updates of y, where `inner` gives those of z.

    z <- z + update(gradient at y), x <- x + c (z - x) with c the share of the squared learning rate in the
    sum of all so far, y <- (1 - b1) z + b1 x.

    Args:
      inner: of the whole update, with learning rate and decay.
      relative: the learning rate over time.
      config: `config.optim`.
    """

    def init(params):
        z = jax.tree.map(jnp.copy, params)
        return ScheduleFreeState(jnp.int32(0), jnp.float32(0), inner.init(params), z)

    def update(grads, state, params):
        updates, inner_state = inner.update(grads, state.inner, params)
        weight = relative(state.count) ** 2
        total = state.weight + weight
        share = jnp.where(total > 0, weight / jnp.where(total > 0, total, 1.0), 0.0)
        z = optax.apply_updates(state.z, updates)

        def move(y, old, new):
            x = _mean(y, old, config.b1)
            x += share * (new - x)
            return (1 - config.b1) * new + config.b1 * x - y

        moves = jax.tree.map(move, params, state.z, z)
        return moves, ScheduleFreeState(state.count + 1, total, inner_state, z)

    return optax.GradientTransformation(init, update)


def mean(config: Optim, params: Any, opt_state: Any) -> Any:
    """x, from y and the state of the optimizer; of frozen parameters themselves."""

    def of_parameter(y, z):
        return y if isinstance(z, optax.MaskedNode) else _mean(y, z, config.b1)

    return jax.tree.map(of_parameter, params, optax.tree.get(opt_state, "z"))


def _mean(y: jax.Array, z: jax.Array, b1: float) -> jax.Array:
    return (y - (1 - b1) * z) / b1
